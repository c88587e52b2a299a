// Mixtures of experts: each row goes to a few of many feed-forward layers. The rows of one
// expert are brought together, so that its weights stream past all of them once.
#pragma once

#include "elementwise.h"

namespace KV_ISA {

// The experts with the highest logits, the first of equals, and what each weighs.
inline void choose_experts(const KvRouting& to, const float* logits, int32_t* chosen, float* weights) {
    for (int i = 0; i < to.num_chosen; i++) {
        int best = -1;
        for (int e = 0; e < to.num_experts; e++) {
            bool taken = false;
            for (int j = 0; j < i; j++) taken |= chosen[j] == e;
            if (!taken && (best < 0 || logits[e] > logits[best])) best = e;
        }
        chosen[i] = best;
    }
    const float highest = logits[chosen[0]];
    float total = 0.0f;
    for (int i = 0; i < to.num_chosen; i++) total += weights[i] = std::exp(logits[chosen[i]] - highest);
    if (!to.normalize) {
        total = 0.0f;
        for (int e = 0; e < to.num_experts; e++) total += std::exp(logits[e] - highest);
    }
    for (int i = 0; i < to.num_chosen; i++) weights[i] /= total;
}

// One thread does it all: the logits are few, and the sort needs them together.
inline void route(const KvOp& op, int32_t num_rows, WorkQueue& queue) {
    if (queue.take() != 0) return;
    const KvRouting& to = *op.routing;
    int32_t* counts = to.first_share + 1;
    std::memset(to.first_share, 0, sizeof(int32_t) * (to.num_experts + 1));
    // `places` holds each share's expert until its place is known.
    for (int row = 0; row < num_rows; row++) {
        const int64_t at = int64_t(row) * to.num_chosen;
        choose_experts(to, (const float*)op.input + int64_t(row) * to.num_experts, to.places + at, to.weights + at);
        for (int i = 0; i < to.num_chosen; i++) counts[to.places[at + i]]++;
    }
    for (int e = 0; e < to.num_experts; e++) counts[e] += to.first_share[e];
    const int num_shares = num_rows * to.num_chosen;
    for (int share = num_shares - 1; share >= 0; share--) {
        // Counting down from each expert's end, counts[e] comes to hold its beginning.
        const int place = --counts[to.places[share]];
        to.shares[place] = share;
        to.places[share] = place;
    }
    for (int e = 0; e < to.num_experts; e++) to.first_share[e] = counts[e];
    to.first_share[to.num_experts] = num_shares;
}

inline void gather(const KvOp& op, int32_t num_rows, WorkQueue& queue) {
    const KvRouting& from = *op.routing;
    for (int place = queue.take(); place < num_rows * from.num_chosen; place = queue.take()) {
        const int row = from.shares[place] / from.num_chosen;
        quantize_row((const float*)op.input + int64_t(row) * op.columns, *op.activation, place);
    }
}

inline void expert_matmul(const KvOp& op, WorkQueue* queues) {
    const KvRouting& routing = *op.routing;
    for (int e = 0; e < routing.num_experts; e++) {
        if (routing.first_share[e] == routing.first_share[e + 1]) continue;
        KvOp part = op;
        part.weight = op.weight + e;
        if (op.bias) part.bias = op.bias + int64_t(e) * op.weight[e].rows;
        matmul_rows(part, routing.first_share[e], routing.first_share[e + 1], queues[e]);
    }
}

inline void combine(const KvOp& op, int32_t num_rows, WorkQueue& queue) {
    const KvRouting& from = *op.routing;
    for (int row = queue.take(); row < num_rows; row = queue.take()) {
        const int64_t first = int64_t(row) * from.num_chosen;
        float* out = (float*)op.output + int64_t(row) * op.columns;
        for (int i = 0; i < op.columns; i += 8) {
            F8 sum = F8::zero();
            for (int j = 0; j < from.num_chosen; j++) {
                const float* share = (const float*)op.input + int64_t(from.places[first + j]) * op.columns;
                sum = fma(F8::set1(from.weights[first + j]), F8::load(share + i), sum);
            }
            fma(F8::set1(op.factor), sum, F8::load(out + i)).store(out + i);
        }
    }
}

}  // namespace KV_ISA
