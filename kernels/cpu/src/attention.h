// Paged attention over ragged rows: prefill chunks, decodes and draft verification in
// one pass, by the online softmax of FlashAttention (Dao et al. 2022) over tiles of
// keys; long contexts are split and reduced (Flash-Decoding).
#pragma once

#include <memory>
#include <type_traits>

#include "elementwise.h"

namespace KV_ISA {

enum { KEY_TILE = 64, MAX_QUERIES = 32, MAX_HEAD_DIM = 256 };

struct AttentionScratch {
    alignas(64) float scores[MAX_QUERIES][KEY_TILE];
    alignas(64) float acc[MAX_QUERIES][MAX_HEAD_DIM];
    alignas(64) float key_scale[KEY_TILE], value_scale[KEY_TILE];  // of the tile's tokens, in a cache of bytes
    const float* query[MAX_QUERIES];
    float maximum[MAX_QUERIES], total[MAX_QUERIES];
    int32_t position[MAX_QUERIES];
};

// Blocks follow each other in no order that a processor could foresee: while the first queries (FETCH) go through one,
// they ask for what lies at the same place in `ahead`, a block that comes later.

// scores[first..first+R][begin..begin+block_size) = query . key for one block; 8 * T keys at a time.
template <int R, int T, bool FETCH, class Cache>
KV_INLINE void score_keys(AttentionScratch& s, int first, const Cache* keys, int head_dim, int block_size, int begin,
                          const Cache* ahead) {
    F8 acc[R][T];
    const float* query[R];  // which GCC would read again after every prefetch
    KV_UNROLL
    for (int r = 0; r < R; r++) {
        query[r] = s.query[first + r];
        KV_UNROLL
        for (int t = 0; t < T; t++) acc[r][t] = F8::zero();
    }
    for (int d = 0; d < head_dim; d++) {
        if constexpr (FETCH) prefetch(ahead + int64_t(d) * block_size);
        F8 k[T];
        KV_UNROLL
        for (int t = 0; t < T; t++) k[t] = F8::load(keys + int64_t(d) * block_size + 8 * t);
        KV_UNROLL
        for (int r = 0; r < R; r++) {
            const F8 q = F8::set1(query[r][d]);
            KV_UNROLL
            for (int t = 0; t < T; t++) acc[r][t] = fma(q, k[t], acc[r][t]);
        }
    }
    KV_UNROLL
    for (int r = 0; r < R; r++)
        KV_UNROLL
        for (int t = 0; t < T; t++) acc[r][t].store(&s.scores[first + r][begin + 8 * t]);
}

// Out of line, like its sibling below: with its caller's variables around it, its loop's pointers lose their registers.
template <int R, bool FETCH, class Cache>
KV_NOINLINE void score_block(AttentionScratch& s, int first, const Cache* keys, int head_dim, int block_size,
                             int begin, const Cache* ahead) {
    int t = 0;
    for (; t + 16 <= block_size; t += 16)
        score_keys<R, 2, FETCH>(s, first, keys + t, head_dim, block_size, begin + t, ahead + t);
    if (t < block_size) score_keys<R, 1, FETCH>(s, first, keys + t, head_dim, block_size, begin + t, ahead + t);
}

template <int R, int D, bool FETCH, class Cache>
KV_INLINE void accumulate_values(AttentionScratch& s, int first, const Cache* values, int head_dim, int d, int begin,
                                 int count, const Cache* ahead) {
    F8 acc[R][D];
    const float* probabilities = s.scores[first] + begin;
    KV_UNROLL
    for (int r = 0; r < R; r++)
        KV_UNROLL
        for (int i = 0; i < D; i++) acc[r][i] = F8::load(&s.acc[first + r][d + 8 * i]);
    for (int t = 0; t < count; t++) {
        if constexpr (FETCH) prefetch(ahead + int64_t(t) * head_dim + d);
        F8 v[D];
        KV_UNROLL
        for (int i = 0; i < D; i++) v[i] = F8::load(values + int64_t(t) * head_dim + d + 8 * i);
        KV_UNROLL
        for (int r = 0; r < R; r++) {
            const F8 p = F8::set1(probabilities[KEY_TILE * r + t]);
            KV_UNROLL
            for (int i = 0; i < D; i++) acc[r][i] = fma(p, v[i], acc[r][i]);
        }
    }
    KV_UNROLL
    for (int r = 0; r < R; r++)
        KV_UNROLL
        for (int i = 0; i < D; i++) acc[r][i].store(&s.acc[first + r][d + 8 * i]);
}

template <int R, bool FETCH, class Cache>
KV_NOINLINE void accumulate_block(AttentionScratch& s, int first, const Cache* values, int head_dim, int begin,
                                  int count, const Cache* ahead) {
    int d = 0;
    for (; d + 16 <= head_dim; d += 16)
        accumulate_values<R, 2, FETCH>(s, first, values, head_dim, d, begin, count, ahead);
    if (d < head_dim) accumulate_values<R, 1, FETCH>(s, first, values, head_dim, d, begin, count, ahead);
}

// Calls block<R, whether they are the first>(first query) over all queries, as many at a time as the registers hold.
template <class Block>
inline void over_queries(int num_queries, Block block) {
    int i = 0;
    const auto next = [&]<int R>(std::integral_constant<int, R> rows) {
        for (; i + R <= num_queries; i += R)
            if (i == 0)
                block(rows, std::true_type(), i);
            else
                block(rows, std::false_type(), i);
    };
    next(std::integral_constant<int, 6>());
    next(std::integral_constant<int, 3>());
    next(std::integral_constant<int, 1>());
}

// Masks, scales and exponentiates one tile of scores of query r; folds it into the running softmax.
// In a cache of bytes, a token's scales multiply its score before, and its probability after.
template <class Cache>
inline void softmax_tile(AttentionScratch& s, int r, const KvAttentionSpec& spec, int tile_begin, int count) {
    const float lowest = -INFINITY;
    float* scores = s.scores[r];
    const int position = s.position[r];
    // Invariant: a query at position p sees keys k with k <= p and, with a window, k > p - window.
    const int visible_end = std::min(count, position + 1 - tile_begin);
    const int visible_begin = spec.window ? std::max(0, position - spec.window + 1 - tile_begin) : 0;
    const int padded = (count + 7) / 8 * 8;
    const bool all_visible = visible_begin == 0 && visible_end == padded;
    const auto hide = [&](float value) {
        for (int t = 0; t < padded; t++)
            if (t < visible_begin || t >= visible_end) scores[t] = value;
    };
    const F8 scale = F8::set1(spec.scale);
    F8 top = F8::set1(lowest), total = F8::zero();
    for (int t = 0; t < padded; t += 8) {
        F8 v = F8::load(scores + t) * scale;
        if (std::is_same<Cache, int8_t>::value) v = v * F8::load(s.key_scale + t);
        if (spec.soft_cap > 0.0f) v = soft_capped(v, spec.soft_cap);
        v.store(scores + t);
        top = max(top, v);
    }
    if (!all_visible) {
        hide(lowest);
        top = F8::set1(lowest);
        for (int t = 0; t < padded; t += 8) top = max(top, F8::load(scores + t));
    }
    const float maximum = std::max(s.maximum[r], max_lane(top));
    if (maximum == lowest) {
        for (int t = 0; t < padded; t++) scores[t] = 0.0f;
        return;
    }
    const F8 shift = F8::set1(maximum);
    for (int t = 0; t < padded; t += 8) {
        const F8 p = exp(F8::load(scores + t) - shift);
        p.store(scores + t);
        total = total + p;
    }
    // exp clamps its input, so a masked score must be zeroed, not left at exp(-87).
    if (!all_visible) {
        hide(0.0f);
        total = F8::zero();
        for (int t = 0; t < padded; t += 8) total = total + F8::load(scores + t);
    }
    if (std::is_same<Cache, int8_t>::value)
        for (int t = 0; t < padded; t += 8) (F8::load(scores + t) * F8::load(s.value_scale + t)).store(scores + t);
    if (maximum > s.maximum[r]) {
        const float correction = s.maximum[r] == lowest ? 0.0f : std::exp(s.maximum[r] - maximum);
        s.total[r] *= correction;
        for (int d = 0; d < spec.head_dim; d += 8)
            (F8::load(&s.acc[r][d]) * F8::set1(correction)).store(&s.acc[r][d]);
        s.maximum[r] = maximum;
    }
    s.total[r] += sum(total);
}

// What the sum of values weighted by exp(score - maximum) is multiplied by; a sink weighs in with no value.
inline float inverse_total(const KvAttentionSpec& spec, int head, float maximum, float total) {
    // Infinity, where a sink lies far above all scores, gives the 0 that the keys' weights are then.
    if (spec.sinks) total += std::exp(spec.sinks[head] - maximum);
    return total > 0.0f ? 1.0f / total : 0.0f;
}

template <class Cache>
inline void attention_item(const KvOp& op, const KvBatch& batch, const AttentionItem& item, AttentionScratch& s) {
    const KvAttentionSpec& spec = *op.attention;
    const int head_dim = spec.head_dim, block_size = spec.block_size, group = spec.num_heads / spec.num_kv_heads;
    const int width = (spec.num_heads + 2 * spec.num_kv_heads) * head_dim;
    const int num_queries = item.num_rows * group;
    const int32_t* blocks = batch.block_tables + int64_t(item.sequence) * batch.max_blocks;
    for (int i = 0; i < num_queries; i++) {
        const int row = item.first_row + i / group, head = item.kv_head * group + i % group;
        s.query[i] = (const float*)op.input + int64_t(row) * width + head * head_dim;
        s.position[i] = batch.positions[row];
        s.maximum[i] = -INFINITY;
        s.total[i] = 0.0f;
        std::memset(s.acc[i], 0, sizeof(float) * head_dim);
    }
    int begin = item.key_begin;
    if (spec.window) begin = std::max(begin, (s.position[0] - spec.window + 1) / KEY_TILE * KEY_TILE);
    const int end = std::min(item.key_end, s.position[num_queries - 1] + 1);
    const int64_t head_size = int64_t(block_size) * head_dim;
    const auto head_of = [&](int token) {  // where this head's numbers of a token's block begin
        return (int64_t(blocks[token / block_size]) * spec.num_kv_heads + item.kv_head) * head_size;
    };
    const auto *all_keys = (const Cache*)spec.keys, *all_values = (const Cache*)spec.values;
    for (int tile = begin; tile < end; tile += KEY_TILE) {
        const int count = std::min<int>(KEY_TILE, end - tile);
        for (int t = 0; t < count; t += block_size) {
            const int64_t at = head_of(tile + t);
            const Cache* keys = all_keys + at;
            if (std::is_same<Cache, int8_t>::value) {
                std::memcpy(s.key_scale + t, spec.key_scales + at / head_dim, sizeof(float) * block_size);
                std::memcpy(s.value_scale + t, spec.value_scales + at / head_dim, sizeof(float) * block_size);
            }
            over_queries(num_queries, [&]<int R, bool FIRST>(std::integral_constant<int, R>,
                                                             std::bool_constant<FIRST>, int i) {
                score_block<R, FIRST>(s, i, keys, head_dim, block_size, t, all_values + at);
            });
        }
        for (int i = 0; i < num_queries; i++) softmax_tile<Cache>(s, i, spec, tile, count);
        for (int t = 0; t < count; t += block_size) {
            const Cache* values = all_values + head_of(tile + t);
            const int later = tile + t + KEY_TILE;
            const int in_block = std::min(block_size, count - t);
            const Cache* ahead = later < end ? all_keys + head_of(later) : values;
            over_queries(num_queries, [&]<int R, bool FIRST>(std::integral_constant<int, R>,
                                                             std::bool_constant<FIRST>, int i) {
                accumulate_block<R, FIRST>(s, i, values, head_dim, t, in_block, ahead);
            });
        }
    }
    for (int i = 0; i < num_queries; i++) {
        if (item.partial) {
            float* partial = item.partial + int64_t(i) * (2 + head_dim);
            partial[0] = s.maximum[i];
            partial[1] = s.total[i];
            std::memcpy(partial + 2, s.acc[i], sizeof(float) * head_dim);
            continue;
        }
        const int row = item.first_row + i / group, head = item.kv_head * group + i % group;
        float* out = (float*)op.output + (int64_t(row) * spec.num_heads + head) * head_dim;
        const F8 inverse = F8::set1(inverse_total(spec, head, s.maximum[i], s.total[i]));
        for (int d = 0; d < head_dim; d += 8) (F8::load(&s.acc[i][d]) * inverse).store(out + d);
    }
}

inline void attention(const KvOp& op, const KvBatch& batch, const AttentionItem* items, int32_t num_items,
                      WorkQueue& queue) {
    // Behind a pointer: GCC looks for a thread's own variables again at each use.
    static thread_local const auto own_scratch = std::make_unique<AttentionScratch>();
    AttentionScratch& scratch = *own_scratch;
    for (int i = queue.take(); i < num_items; i = queue.take()) {
        switch (op.attention->cache_kind) {
            case KV_CACHE_F16: attention_item<uint16_t>(op, batch, items[i], scratch); break;
            case KV_CACHE_INT8: attention_item<int8_t>(op, batch, items[i], scratch); break;
            default: attention_item<float>(op, batch, items[i], scratch);
        }
    }
}

// Combines the splits of each item: weights exp(maximum - overall maximum), then one division.
inline void attention_reduce(const KvOp& op, const KvBatch&, const AttentionItem* items, int32_t num_items,
                             WorkQueue& queue) {
    const KvAttentionSpec& spec = *op.attention;
    const int head_dim = spec.head_dim, group = spec.num_heads / spec.num_kv_heads, stride = 2 + head_dim;
    for (int n = queue.take(); n < num_items; n = queue.take()) {
        const AttentionItem& item = items[n];
        if (item.num_splits == 1 || item.split != 0) continue;
        // The splits of one item lie next to each other, in items and in partials.
        const int64_t split_stride = int64_t(item.num_rows) * group * stride;
        for (int i = 0; i < item.num_rows * group; i++) {
            const float* partial = item.partial + int64_t(i) * stride;
            float maximum = -INFINITY, total = 0.0f;
            for (int s = 0; s < item.num_splits; s++) maximum = std::max(maximum, partial[s * split_stride]);
            const int row = item.first_row + i / group, head = item.kv_head * group + i % group;
            float* out = (float*)op.output + (int64_t(row) * spec.num_heads + head) * head_dim;
            std::memset(out, 0, sizeof(float) * head_dim);
            for (int s = 0; s < item.num_splits; s++) {
                const float* p = partial + s * split_stride;
                if (p[0] == -INFINITY) continue;
                const float weight = std::exp(p[0] - maximum);
                total += weight * p[1];
                for (int d = 0; d < head_dim; d += 8)
                    fma(F8::set1(weight), F8::load(p + 2 + d), F8::load(out + d)).store(out + d);
            }
            const F8 inverse = F8::set1(inverse_total(spec, head, maximum, total));
            for (int d = 0; d < head_dim; d += 8) (F8::load(out + d) * inverse).store(out + d);
        }
    }
}

}  // namespace KV_ISA
