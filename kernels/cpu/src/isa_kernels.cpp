// Compiled once per instruction set, with KV_ISA set to its namespace.
#include "attention.h"
#include "experts.h"
#include "sampling.h"

#define KV_TEXT_OF(name) #name
#define KV_TEXT(name) KV_TEXT_OF(name)

namespace KV_ISA {

extern const KernelTable table;
const KernelTable table = {
    KV_TEXT(KV_ISA) + 3,  // the namespace less its "kv_"
    embed, norm, quantize, matmul, expert_matmul, route, gather, combine,
    rope_kv, attention, attention_reduce, dequantize, sample,
};

}  // namespace KV_ISA
