// Several steps of decoding in a row, each from the tokens that the one before drew.
#include <chrono>

#include "kvasir_cpu.h"

namespace {

bool decodes(const KvBatch& batch, const KvSampling& sampling, int32_t num_steps, int32_t block_size) {
    if (batch.num_sequences != batch.num_rows || batch.num_selected != batch.num_rows) return false;
    if (sampling.num_rows != batch.num_rows || sampling.draft_ids || sampling.probs) return false;
    if (num_steps < 1 || block_size < 1) return false;
    const int64_t room = int64_t(batch.max_blocks) * block_size;
    for (int32_t r = 0; r < batch.num_rows; r++)
        if (batch.selected[r] != r || batch.positions[r] + int64_t(num_steps) > room) return false;
    return true;
}

// The token that each sequence has got is its next input, one place further on.
void move_on(const KvBatch& batch, const int64_t* token_ids, int32_t block_size) {
    for (int32_t r = 0; r < batch.num_rows; r++) {
        const int32_t at = batch.positions[r] + 1;
        const int64_t block = batch.block_tables[int64_t(r) * batch.max_blocks + at / block_size];
        const_cast<int32_t*>(batch.input_ids)[r] = int32_t(token_ids[r]);
        const_cast<int32_t*>(batch.positions)[r] = at;
        const_cast<int32_t*>(batch.seq_lens)[r] = at + 1;
        const_cast<int64_t*>(batch.slot_mapping)[r] = block * block_size + at % block_size;
    }
}

}  // namespace

extern "C" int32_t kv_run_steps(const KvOp* ops, int32_t num_ops, const KvBatch* batch, const KvSampling* sampling,
                                int32_t num_steps, int32_t block_size, int64_t* nanoseconds) {
    if (!decodes(*batch, *sampling, num_steps, block_size)) return -1;
    using Clock = std::chrono::steady_clock;
    KvSampling own = *sampling;
    for (int32_t step = 0;; step++) {
        if (nanoseconds)
            kv_run_profiled(ops, num_ops, batch, nanoseconds);
        else
            kv_run(ops, num_ops, batch);
        const Clock::time_point before = Clock::now();
        if (kv_sample(&own) != 0) return -1;
        if (nanoseconds) nanoseconds[num_ops] += std::chrono::nanoseconds(Clock::now() - before).count();
        if (step + 1 == num_steps) return 0;
        move_on(*batch, own.token_ids, block_size);
        own.uniforms += own.num_rows;
        own.token_ids += own.num_rows;
        own.healthy += own.num_rows;
    }
}
