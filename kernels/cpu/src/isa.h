// The functions that exist once per instruction set, and how they share out work.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>

#include "kvasir_cpu.h"

// Hands out chunk numbers of one operation to whichever thread is free: a core that
// another program borrows for a moment then delays one chunk, not half the work.
//
// The operation is over once all numbers are taken and all threads that came have left. Threads that
// have not come by then are not waited for, and must not begin: `enter` tells them.
class WorkQueue {
  public:
    void reset(int32_t threads) {
        num_threads = threads;
        next_.store(0, std::memory_order_relaxed);
        presence_.store(0, std::memory_order_relaxed);
    }
    // Acquires and releases, so that who finds no number left also knows of all who entered before they took one.
    int32_t take() { return next_.fetch_add(1, std::memory_order_acq_rel); }
    bool enter() { return !(presence_.fetch_add(ENTERED, std::memory_order_acq_rel) & CLOSED); }
    // To be called when no number is left; true for the last to leave.
    bool leave() {
        uint64_t now = presence_.load(std::memory_order_relaxed), then;
        do {
            then = now + LEFT;
            if (then / ENTERED == then % ENTERED) then |= CLOSED;
        } while (!presence_.compare_exchange_weak(now, then, std::memory_order_acq_rel, std::memory_order_relaxed));
        return then & CLOSED;
    }

    int32_t num_threads = 1;  // that may take from it

  private:
    static constexpr uint64_t LEFT = 1, ENTERED = uint64_t(1) << 31, CLOSED = uint64_t(1) << 63;
    std::atomic<int32_t> next_{0};
    std::atomic<uint64_t> presence_{0};
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

// Query rows of one part, of the heads that share a KV head together.
constexpr int MAX_QUERIES = 32;
constexpr int MAX_NORMED = 16384;

bool valid_weight(const KvWeight* weight);

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
