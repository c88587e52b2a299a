// The functions that exist once per instruction set, and how they share out work.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>

#include "kvasir_cpu.h"

// Hands out chunk numbers of one operation to whichever thread is free: a core that
// another program borrows for a moment then delays one chunk, not half the work.
struct WorkQueue {
    std::atomic<int32_t> next{0};
    int32_t take() { return next.fetch_add(1, std::memory_order_relaxed); }
};

// One part of the attention of a step: some query rows of a sequence, one KV head,
// and the keys in [key_begin, key_end).
struct AttentionItem {
    int32_t sequence, first_row, num_rows, kv_head;
    int32_t key_begin, key_end;
    int32_t split, num_splits;
    float* partial;  // this split's [num_rows * group][2 + head_dim]; NULL when it is the only one
};

// The epilogues that take two rows of the weight for each output.
inline bool is_paired(const KvOp& op) {
    return op.epilogue == KV_SWIGLU || op.epilogue == KV_GEGLU || op.epilogue == KV_CLAMPED_SWIGLU;
}

struct KernelTable {
    const char* name;
    void (*embed)(const KvOp&, const KvBatch&, WorkQueue&);
    void (*norm)(const KvOp&, int32_t num_rows, WorkQueue&);
    void (*quantize)(const KvOp&, int32_t num_rows, WorkQueue&);
    void (*matmul)(const KvOp&, int32_t num_rows, WorkQueue&);
    void (*expert_matmul)(const KvOp&, WorkQueue* queues);  // a queue for each expert
    void (*route)(const KvOp&, int32_t num_rows, WorkQueue&);
    void (*gather)(const KvOp&, int32_t num_rows, WorkQueue&);
    void (*combine)(const KvOp&, int32_t num_rows, WorkQueue&);
    void (*rope_kv)(const KvOp&, const KvBatch&, WorkQueue&);
    void (*attention)(const KvOp&, const KvBatch&, const AttentionItem*, int32_t num_items, WorkQueue&);
    void (*attention_reduce)(const KvOp&, const KvBatch&, const AttentionItem*, int32_t num_items, WorkQueue&);
    void (*dequantize)(const KvWeight&, int32_t first, int32_t count, float* out);
    void (*sample)(const KvSampling&, WorkQueue&);  // rows
};

// Calls work with the kernels in use, on all threads of the pool or on this one, when no other call uses them.
void with_kernels(bool on_all_threads, const std::function<void(const KernelTable&)>& work);

namespace kv_portable { extern const KernelTable table; }
#if defined(KV_HAVE_AVX2)
namespace kv_avx2 { extern const KernelTable table; }
#endif
#if defined(KV_HAVE_AVX512)
namespace kv_avx512 { extern const KernelTable table; }
#endif
#if defined(KV_HAVE_NEON)
namespace kv_neon { extern const KernelTable table; }
#endif
