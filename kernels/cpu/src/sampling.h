// From a row of logits to a token: softmax at a temperature, min-p, top-k, top-p, and a draw.
//
// Only one or two passes touch the whole vocabulary: its maximum, and the sum of its
// weights where top-p or the draw needs it. A bound that no likely token lies below then
// leaves a few candidates, on which the filters are exact.
#pragma once

#include <algorithm>
#include <bit>
#include <cfloat>
#include <vector>

#include "isa.h"
#include "simd.h"

namespace KV_ISA {

enum { SPAN = 256 };
// In front of a bound in the exponent: more than rounding, less than would let many tokens pass.
constexpr float MARGIN = 1e-3f;
// Weights are relative to the likeliest token's, and zero below this: no draw tells them from it.
constexpr float LOWEST_EXPONENT = -87.0f;

struct SamplingScratch {
    std::vector<float> maxima;      // of each span, lane by lane
    std::vector<double> span_sums;  // of weights
    std::vector<int32_t> ids;       // candidates in the order of the vocabulary
    std::vector<float> weights;
    std::vector<float> sorted;
    std::vector<double> masses;
    std::vector<double> exact;  // the weights that a draw is made from
};

// A row in spans of SPAN logits; what lies beyond the vocabulary reads as minus infinity.
struct LogitRow {
    const float* values;
    int32_t size, num_spans;
    alignas(32) float tail[SPAN];

    LogitRow(const float* logits, int32_t vocab_size)
        : values(logits), size(vocab_size), num_spans((vocab_size + SPAN - 1) / SPAN) {
        const int32_t whole = size / SPAN * SPAN;
        std::fill(std::copy(values + whole, values + size, tail), tail + SPAN, -INFINITY);
    }
    const float* span(int32_t s) const { return s < size / SPAN ? values + int64_t(s) * SPAN : tail; }
};

struct Extent {
    float maximum;
    bool healthy;
};

inline Extent scan(const LogitRow& row, SamplingScratch& s) {
    s.maxima.resize(std::max(s.maxima.size(), size_t(8) * row.num_spans));
    F8 top = F8::set1(-INFINITY);
    M8 nan = M8::none();
    for (int32_t n = 0; n < row.num_spans; n++) {
        const float* x = row.span(n);
        F8 most[4];
        for (int i = 0; i < 4; i++) most[i] = F8::load(x + 8 * i);
        nan = nan | unordered(most[0], most[1]) | unordered(most[2], most[3]);
        for (int at = 32; at < SPAN; at += 32) {
            F8 v[4];
            for (int i = 0; i < 4; i++) v[i] = F8::load(x + at + 8 * i);
            nan = nan | unordered(v[0], v[1]) | unordered(v[2], v[3]);
            for (int i = 0; i < 4; i++) most[i] = max(most[i], v[i]);
        }
        const F8 lanes = max(max(most[0], most[1]), max(most[2], most[3]));
        lanes.store(&s.maxima[8 * n]);
        top = max(top, lanes);
    }
    const float maximum = max_lane(top);
    return {maximum, nan.bits() == 0 && std::isfinite(maximum)};
}

// The first of the likeliest.
inline int32_t first_at(const LogitRow& row, const SamplingScratch& s, float maximum) {
    const F8 m = F8::set1(maximum);
    for (int32_t n = 0; n < row.num_spans; n++) {
        if (!(F8::load(&s.maxima[8 * n]) >= m).bits()) continue;
        const float* x = row.span(n);
        for (int i = 0; i < SPAN; i += 8)
            if (const uint32_t hit = (F8::load(x + i) >= m).bits()) return n * SPAN + i + std::countr_zero(hit);
    }
    return 0;
}

// softmax before its division: exp((logit - maximum) / temperature).
struct Softmax {
    float maximum, inverse_temperature;

    Softmax(float highest, float temperature)
        : maximum(highest), inverse_temperature(std::min(1.0f / temperature, FLT_MAX)) {}
    F8 operator()(F8 logits) const {
        const F8 x = (logits - F8::set1(maximum)) * F8::set1(inverse_temperature);
        return exp(x) & (x >= F8::set1(LOWEST_EXPONENT));
    }
    // How far below the maximum logits of this weight lie, or a little lower.
    float offset_of(double weight) const {
        const double exponent = weight > 0.0 ? std::max(std::log(weight), double(LOWEST_EXPONENT)) : LOWEST_EXPONENT;
        return float(std::max((exponent - MARGIN) / inverse_temperature, -double(FLT_MAX)));
    }
};

inline double total_of(D8 sums) {
    double v[8];
    sums.store(v);
    return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}

// Sums weights by span; weights_of(n, i) gives eight of span n from i on.
template <class Weights>
inline double sum_spans(int32_t num_spans, SamplingScratch& s, Weights weights_of) {
    s.span_sums.resize(std::max(s.span_sums.size(), size_t(num_spans)));
    double total = 0.0;
    for (int32_t n = 0; n < num_spans; n++) {
        D8 sums = D8::zero();
        for (int i = 0; i < SPAN; i += 8) sums.add(weights_of(n, i));
        total += s.span_sums[n] = total_of(sums);
    }
    return total;
}

inline double draw_target(double total, double uniform) { return std::min(uniform * total, std::nextafter(total, 0.0)); }

// Where the cumulative sum of weights passes the target, after `before`; the last that weighs anything if it
// falls short by rounding.
template <class Weight>
inline int32_t pass_target(const Weight* weights, int32_t count, double before, double target) {
    int32_t last = 0;
    for (int32_t i = 0; i < count; i++) {
        if (!(weights[i] > 0)) continue;
        last = i;
        before += double(weights[i]);
        if (before > target) break;
    }
    return last;
}

// Inverts the cumulative distribution of weights whose span sums are in the scratch.
template <class Weights>
inline int32_t draw_spans(int32_t num_spans, const SamplingScratch& s, double target, Weights weights_of) {
    double before = 0.0;
    int32_t n = 0;
    while (n + 1 < num_spans && before + s.span_sums[n] <= target) before += s.span_sums[n++];
    float weights[SPAN];
    for (int i = 0; i < SPAN; i += 8) weights_of(n, i).store(weights + i);
    return n * SPAN + pass_target(weights, SPAN, before, target);
}

// Gathers the tokens at most `offset` (negative) below the maximum; returns how many.
inline int32_t collect(const LogitRow& row, SamplingScratch& s, const Softmax& softmax, float offset) {
    const F8 m = F8::set1(softmax.maximum), bound = F8::set1(offset);
    const size_t room = size_t(row.num_spans) * SPAN;
    s.ids.resize(std::max(s.ids.size(), room));
    s.weights.resize(std::max(s.weights.size(), room));
    int32_t count = 0;
    for (int32_t n = 0; n < row.num_spans; n++) {
        if (!(F8::load(&s.maxima[8 * n]) - m >= bound).bits()) continue;
        const float* x = row.span(n);
        for (int i = 0; i < SPAN; i += 8) {
            const uint32_t hits = (F8::load(x + i) - m >= bound).bits();
            if (!hits) continue;
            for (int lane = 0; lane < 8; lane++) {  // no branch: nobody could foretell it
                s.ids[count] = n * SPAN + i + lane;
                s.weights[count] = x[i + lane];
                count += hits >> lane & 1;
            }
        }
    }
    for (int32_t i = count; i % 8; i++) s.weights[i] = -INFINITY;  // there is room: spans are whole
    for (int32_t i = 0; i < count; i += 8) softmax(F8::load(&s.weights[i])).store(&s.weights[i]);
    return count;
}

// Keeps the candidates of at least this weight; returns how many.
inline int32_t keep_at_least(SamplingScratch& s, int32_t count, float threshold) {
    int32_t kept = 0;
    for (int32_t i = 0; i < count; i++) {
        s.ids[kept] = s.ids[i];
        s.weights[kept] = s.weights[i];
        kept += s.weights[i] >= threshold;
    }
    return kept;
}

// The k-th largest of values[count], which are left alone.
inline float kth_largest(const float* values, int32_t count, int32_t k, std::vector<float>& room) {
    room.assign(values, values + count);
    std::nth_element(room.begin(), room.begin() + (k - 1), room.end(), std::greater<float>());
    return room[k - 1];
}

// Positive floats order like their bits: the upper half of a weight's bits is a bucket of weights
// within 1/128 of each other. Bucket 0 holds 1, the likeliest token's.
inline int32_t bucket_of(float weight) {
    return std::max(0, 0x3F80 - int32_t(std::bit_cast<uint32_t>(weight) >> 16));
}

// The smallest weight of the smallest set of largest candidates whose weights reach `target`; only the weights of the
// bucket in which the sum crosses it are sorted. Candidates below `lowest` are never needed.
inline float nucleus_edge(SamplingScratch& s, int32_t count, float lowest, double target) {
    double above = 0.0;
    s.sorted.clear();
    if (count <= 128) {
        s.sorted.assign(s.weights.begin(), s.weights.begin() + count);
    } else {
        const int32_t last = bucket_of(lowest);
        s.masses.assign(last + 1, 0.0);
        for (int32_t i = 0; i < count; i++) s.masses[std::min(last, bucket_of(s.weights[i]))] += s.weights[i];
        int32_t crossing = 0;
        while (crossing < last && above + s.masses[crossing] < target) above += s.masses[crossing++];
        for (int32_t i = 0; i < count; i++)
            if (bucket_of(s.weights[i]) == crossing) s.sorted.push_back(s.weights[i]);
        if (s.sorted.empty()) return lowest;  // rounding kept the sum below the target to the last
    }
    std::sort(s.sorted.begin(), s.sorted.end(), std::greater<float>());
    float edge = s.sorted[0];
    for (const float weight : s.sorted) {
        if (above >= target) break;
        edge = weight;
        above += weight;
    }
    return edge;
}

struct RowFilters {
    float min_p, top_p;
    int32_t top_k;  // 0: off
};

// Applies min-p, top-k and top-p, each a threshold that ties pass. Returns the number of candidates left.
inline int32_t filter(const LogitRow& row, SamplingScratch& s, const Softmax& softmax, const RowFilters& by) {
    const bool nucleus = by.top_p < 1.0f, closed = by.min_p > 0.0f || by.top_k > 0;
    if (!closed) {
        const double total =
            sum_spans(row.num_spans, s, [&](int32_t n, int i) { return softmax(F8::load(row.span(n) + i)); });
        // All tokens that weigh less than this together weigh too little to matter.
        const double lowest = (total - by.top_p * total) / row.size;
        const int32_t count = collect(row, s, softmax, softmax.offset_of(lowest));
        return keep_at_least(s, count, nucleus_edge(s, count, float(lowest), by.top_p * total));
    }
    float offset = softmax.offset_of(by.min_p);
    if (by.top_k > 0 && by.top_k <= 8 * row.num_spans)
        // Each of the k largest maxima is another token: none of the k likeliest lies below.
        offset = std::max(
            offset, kth_largest(s.maxima.data(), 8 * row.num_spans, by.top_k, s.sorted) - softmax.maximum);
    int32_t count = collect(row, s, softmax, offset);
    float threshold = std::clamp(by.min_p, FLT_MIN, 1.0f);
    if (by.top_k > 0 && by.top_k < count)
        threshold = std::max(threshold, kth_largest(s.weights.data(), count, by.top_k, s.sorted));
    count = keep_at_least(s, count, threshold);
    if (!nucleus) return count;
    double total = 0.0;
    for (int32_t i = 0; i < count; i++) total += s.weights[i];
    return keep_at_least(s, count, nucleus_edge(s, count, threshold, by.top_p * total));
}

// What one row is drawn from: a few tokens, or the softmax of all.
class Distribution {
    bool is_dense() const { return num_candidates_ < 0; }
    auto weights() const {
        return [this](int32_t n, int i) { return softmax_(F8::load(row_.span(n) + i)); };
    }
    F8 probabilities(int32_t n, int i) const { return weights()(n, i) * inverse_total_; }

  public:
    Distribution(const KvSampling& batch, int32_t r, const LogitRow& row, const Extent& extent, SamplingScratch& s)
        : row_(row), s_(s), softmax_(extent.maximum, 1.0f) {
        const float temperature = batch.temperature[r];
        if (!(temperature > 0.0f)) {
            num_candidates_ = 1;
            s.ids.assign(1, first_at(row, s, extent.maximum));
            s.exact.assign(1, total_ = 1.0);
            return;
        }
        const RowFilters filters{batch.min_p[r], batch.top_p[r],
                                 batch.top_k[r] < row.size ? std::max(batch.top_k[r], 0) : 0};
        const bool filtered = filters.min_p > 0.0f || filters.top_p < 1.0f || filters.top_k > 0;
        const bool last = filtered && batch.temperature_last[r];
        if (!last) softmax_ = Softmax(extent.maximum, temperature);
        if (!filtered) {
            total_ = sum_spans(row.num_spans, s, weights());
            inverse_total_ = F8::set1(float(1.0 / total_));
            return;
        }
        num_candidates_ = filter(row, s, softmax_, filters);
        s.exact.resize(num_candidates_);
        for (int32_t i = 0; i < num_candidates_; i++) {
            s.exact[i] = last ? std::exp((double(row.values[s.ids[i]]) - extent.maximum) / temperature) : s.weights[i];
            total_ += s.exact[i];
        }
    }

    int32_t draw(double uniform) const {
        const double target = draw_target(total_, uniform);
        if (is_dense()) return draw_spans(row_.num_spans, s_, target, weights());
        return s_.ids[pass_target(s_.exact.data(), num_candidates_, 0.0, target)];
    }

    // Takes every token's probability under another distribution from its own and draws from what is left; from
    // this one if nothing is. The last draw from a distribution: its sums are gone.
    int32_t draw_residual(const float* others, double uniform) {
        if (is_dense()) {
            const LogitRow other(others, row_.size);  // beyond the end, minus infinity: no probability here is left
            const auto rest = [&](int32_t n, int i) {
                const F8 q = max(F8::load(other.span(n) + i), F8::zero());
                // Not max(p - q, 0), which might be computed from a p that was not rounded as q was.
                return max(probabilities(n, i), q) - q;
            };
            const double total = sum_spans(row_.num_spans, s_, rest);
            if (total > 0.0) return draw_spans(row_.num_spans, s_, draw_target(total, uniform), rest);
            sum_spans(row_.num_spans, s_, weights());
            return draw(uniform);
        }
        double total = 0.0;
        s_.masses.resize(num_candidates_);
        for (int32_t i = 0; i < num_candidates_; i++)
            total += s_.masses[i] = std::max(0.0, double(float(s_.exact[i] / total_)) - others[s_.ids[i]]);
        if (!(total > 0.0)) return draw(uniform);
        return s_.ids[pass_target(s_.masses.data(), num_candidates_, 0.0, draw_target(total, uniform))];
    }

    float probability(int32_t id) const {
        if (is_dense()) {
            float eight[8];
            probabilities(id / SPAN, id % SPAN / 8 * 8).store(eight);
            return eight[id % 8];
        }
        const auto end = s_.ids.begin() + num_candidates_, at = std::lower_bound(s_.ids.begin(), end, id);
        return at != end && *at == id ? float(s_.exact[at - s_.ids.begin()] / total_) : 0.0f;
    }

    void write(float* probs) const {
        if (!is_dense()) {
            std::fill_n(probs, row_.size, 0.0f);
            for (int32_t i = 0; i < num_candidates_; i++) probs[s_.ids[i]] = float(s_.exact[i] / total_);
            return;
        }
        for (int32_t at = 0; at < row_.size; at += 8) {
            float eight[8];
            probabilities(at / SPAN, at % SPAN).store(eight);
            std::copy_n(eight, std::min(8, row_.size - at), probs + at);
        }
    }

  private:
    const LogitRow& row_;
    SamplingScratch& s_;
    Softmax softmax_;
    int32_t num_candidates_ = -1;
    double total_ = 0.0;
    F8 inverse_total_ = F8::zero();
};

inline void sample_row(const KvSampling& batch, int32_t r, SamplingScratch& scratch) {
    const LogitRow row(batch.logits + r * batch.logits_stride, batch.vocab_size);
    const Extent extent = scan(row, scratch);
    float* probs = batch.probs ? batch.probs + r * batch.probs_stride : nullptr;
    batch.healthy[r] = extent.healthy;
    batch.token_ids[r] = 0;
    if (batch.accepted) batch.accepted[r] = false;
    if (!extent.healthy) {
        if (probs) std::fill_n(probs, row.size, 0.0f);
        return;
    }
    Distribution distribution(batch, r, row, extent, scratch);
    if (probs) distribution.write(probs);
    if (batch.draft_ids && batch.draft_ids[r] >= 0) {
        const float* q = batch.draft_probs + r * batch.draft_probs_stride;
        const int64_t draft = batch.draft_ids[r];
        batch.accepted[r] = batch.accept_uniforms[r] * q[draft] < distribution.probability(int32_t(draft));
        batch.token_ids[r] = distribution.draw_residual(q, batch.uniforms[r]);
    } else {
        batch.token_ids[r] = distribution.draw(batch.uniforms[r]);
    }
}

inline void sample(const KvSampling& batch, WorkQueue& queue) {
    static thread_local SamplingScratch scratch;
    for (int32_t row = queue.take(); row < batch.num_rows; row = queue.take()) sample_row(batch, row, scratch);
}

}  // namespace KV_ISA
