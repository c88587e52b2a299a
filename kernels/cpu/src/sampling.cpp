// Changes logits as requests ask for, and shares out rows to be sampled.
#include <vector>

#include "isa.h"

namespace {

// How the count of each delta's token differs from the tables, and its logit before they were applied.
struct Penaliser {
    const KvAdjustment& a;
    std::vector<float> before = {};

    void run(int32_t r) {
        const int64_t slot = a.slots[r];
        if (slot < 0) return;
        float* logits = a.logits + r * a.logits_stride;
        const int32_t* sequence = a.sequence + slot * a.vocab_size;
        const int32_t* output = a.output + slot * a.vocab_size;
        const int32_t* ids = a.delta_ids + int64_t(r) * a.num_deltas;
        before.resize(a.num_deltas);
        for (int32_t i = 0; i < a.num_deltas; i++)
            if (known(ids[i])) before[i] = logits[ids[i]];
        if (a.repetition[r] != 1.0f)
            each_counted(sequence, [&](int32_t id, int32_t) { logits[id] = repeated(r, logits[id]); });
        if (a.presence[r] != 0.0f || a.frequency[r] != 0.0f)
            each_counted(output, [&](int32_t id, int32_t times) { logits[id] -= loss(r, times); });
        for (int32_t i = 0; i < a.num_deltas; i++) {
            if (!known(ids[i])) continue;
            float value = before[i];
            if (count(sequence, a.delta_sequence, r, ids[i]) > 0) value = repeated(r, value);
            const int32_t times = count(output, a.delta_output, r, ids[i]);
            if (times > 0) value -= loss(r, times);
            logits[ids[i]] = value;
        }
    }

  private:
    bool known(int32_t id) const { return id >= 0 && id < a.vocab_size; }

    // Most counts are zero, and a run of zeros is passed over at the speed of memory.
    template <class Change>
    void each_counted(const int32_t* counts, Change change) const {
        constexpr int32_t RUN = 32;
        int32_t id = 0;
        for (; id + RUN <= a.vocab_size; id += RUN) {
            int32_t any = 0;
            for (int32_t i = 0; i < RUN; i++) any |= counts[id + i];
            if (!any) continue;
            for (int32_t i = id; i < id + RUN; i++)
                if (counts[i] > 0) change(i, counts[i]);
        }
        for (; id < a.vocab_size; id++)
            if (counts[id] > 0) change(id, counts[id]);
    }

    int32_t count(const int32_t* table, const int32_t* deltas, int32_t r, int32_t id) const {
        const int64_t first = int64_t(r) * a.num_deltas;
        int32_t times = table[id];
        for (int32_t i = 0; i < a.num_deltas; i++)
            if (a.delta_ids[first + i] == id) times += deltas[first + i];
        return times;
    }

    float repeated(int32_t r, float logit) const {
        return logit > 0.0f ? logit / a.repetition[r] : logit * a.repetition[r];
    }
    float loss(int32_t r, int32_t times) const {
        return float(double(a.presence[r]) + double(a.frequency[r]) * times);
    }
};

// Waking the pool takes as long as one row.
bool worth_sharing(int32_t num_rows, int64_t vocab_size) { return num_rows > 2 && num_rows * vocab_size > (1 << 17); }

}  // namespace

extern "C" {

int32_t kv_adjust_logits(const KvAdjustment* adjustment) {
    const KvAdjustment& a = *adjustment;
    for (int64_t i = 0; i < a.num_cells; i++)
        if (a.cell_rows[i] < 0 || a.cell_rows[i] >= a.num_rows || a.cell_ids[i] < 0 || a.cell_ids[i] >= a.vocab_size)
            return -1;
    for (int32_t r = 0; a.slots && r < a.num_rows; r++)
        if (a.slots[r] >= a.num_slots) return -1;
    for (int64_t i = 0; i < a.num_cells; i++)
        a.logits[a.cell_rows[i] * a.logits_stride + a.cell_ids[i]] += a.cell_values[i];
    if (!a.slots) return 0;
    WorkQueue queue;
    with_kernels(worth_sharing(a.num_rows, a.vocab_size), [&](const KernelTable&) {
        Penaliser penaliser{a};
        for (int32_t row = queue.take(); row < a.num_rows; row = queue.take()) penaliser.run(row);
    });
    return 0;
}

int32_t kv_sample(const KvSampling* sampling) {
    const KvSampling& s = *sampling;
    if (s.vocab_size < 1) return -1;
    for (int32_t r = 0; s.draft_ids && r < s.num_rows; r++)
        if (s.draft_ids[r] >= s.vocab_size) return -1;
    bool greedy = true;
    for (int32_t r = 0; r < s.num_rows; r++) greedy = greedy && !(s.temperature[r] > 0.0f);
    WorkQueue queue;
    with_kernels(worth_sharing(s.num_rows, greedy ? s.vocab_size / 8 : s.vocab_size),
                 [&](const KernelTable& kernels) { kernels.sample(s, queue); });
    return 0;
}

}  // extern "C"
