// Embedding, norm, activation quantisation, rotary embedding with the KV write.
#pragma once

#include "matmul.h"

namespace KV_ISA {

inline float max_magnitude(const float* x, int count) {
    F8 m = F8::zero();
    for (int i = 0; i < count; i += 8) m = max(m, abs(F8::load(x + i)));
    return max_lane(m);
}

// Quantises one row group by group into its panel, or copies it where the matrix product takes floats.
inline void quantize_row(const float* x, const KvActivationBuffer& out, int row) {
    const int64_t columns = out.columns, groups = columns / KV_GROUP;
    if (out.kind == KV_ACT_F32) {
        std::memcpy((float*)out.values + row * columns, x, sizeof(float) * columns);
        return;
    }
    const int width = out.kind == KV_ACT_INT8 ? 1 : 2, lane = row % KV_PANEL;
    const int64_t begin = row - lane;
    char* values = (char*)out.values + begin * columns * width + 4 * lane;
    float* scales = out.scales + begin * groups + lane;
    float* sums = out.scaled_sums + 2 * begin * groups + lane;
    // 32639 = 256 * 127 + 127: the largest value whose high byte is one.
    const float limit = out.kind == KV_ACT_INT8 ? 127.0f : out.kind == KV_ACT_INT16 ? 32767.0f : 32639.0f;
    for (int g = 0; g < groups; g++, x += KV_GROUP, scales += KV_PANEL, sums += 2 * KV_PANEL) {
        const float largest = max_magnitude(x, KV_GROUP);
        const F8 inverse = F8::set1(largest > 0.0f ? limit / largest : 0.0f);
        *scales = largest / limit;
        F8 totals[2] = {F8::zero(), F8::zero()};
        int8_t bytes[2 * KV_GROUP];
        for (int i = 0; i < KV_GROUP; i += 8) {
            const F8 rounded = round(F8::load(x + i) * inverse);
            totals[i / 16] = totals[i / 16] + rounded;
            if (out.kind == KV_ACT_INT8)
                store_int8(rounded, bytes + i);
            else if (out.kind == KV_ACT_INT16)
                store_int16(rounded, (int16_t*)bytes + i);
            else
                store_byte_pairs(rounded, bytes + 2 * i);
        }
        for (int i = 0; i < KV_GROUP * width; i += 4, values += 4 * KV_PANEL) std::memcpy(values, bytes + i, 4);
        const float second_half = sum(totals[1]);
        sums[0] = *scales * (sum(totals[0]) + second_half);
        sums[KV_PANEL] = *scales * second_half;
    }
}

inline void quantize(const KvOp& op, int32_t num_rows, WorkQueue& queue) {
    for (int row = queue.take(); row < num_rows; row = queue.take())
        quantize_row((const float*)op.input + int64_t(row) * op.columns, *op.activation, row);
}

inline float inverse_rms(const float* x, int count, float epsilon) {
    F8 squares = F8::zero();
    for (int i = 0; i < count; i += 8) {
        const F8 v = F8::load(x + i);
        squares = fma(v, v, squares);
    }
    return 1.0f / std::sqrt(sum(squares) / float(count) + epsilon);
}

inline void norm(const KvOp& op, int32_t num_rows, WorkQueue& queue) {
    float normed[16384];
    for (int row = queue.take(); row < num_rows; row = queue.take()) {
        const float* x = (const float*)op.input + int64_t(row) * op.columns;
        const F8 factor = F8::set1(inverse_rms(x, op.columns, op.factor));
        for (int i = 0; i < op.columns; i += 8)
            (F8::load(x + i) * factor * F8::load(op.norm + i)).store(normed + i);
        if (op.activation) {
            quantize_row(normed, *op.activation, row);
            continue;
        }
        float* out = (float*)op.output + int64_t(row) * op.columns;
        for (int i = 0; i < op.columns; i += 8) {
            const F8 v = F8::load(normed + i);
            (op.epilogue == KV_ADD ? F8::load(out + i) + v : v).store(out + i);
        }
    }
}

inline void embed(const KvOp& op, const KvBatch& batch, WorkQueue& queue) {
    const int columns = op.weight->columns;
    for (int row = queue.take(); row < batch.num_rows; row = queue.take()) {
        float* out = (float*)op.output + int64_t(row) * columns;
        dequantize(*op.weight, batch.input_ids[row], 1, out);
        if (op.factor != 1.0f)
            for (int i = 0; i < columns; i++) out[i] *= op.factor;
    }
}

inline void norm_in_place(float* x, const float* weight, int count, float epsilon) {
    const F8 factor = F8::set1(inverse_rms(x, count, epsilon));
    for (int i = 0; i < count; i += 8) (F8::load(x + i) * factor * F8::load(weight + i)).store(x + i);
}

// Rotates pairs (i, i + rotary_dim / 2), the layout of Hugging Face checkpoints.
inline void rotate_head(float* x, const float* cos, const float* sin, int rotary_dim) {
    const int half = rotary_dim / 2;
    int i = 0;
    for (; i + 8 <= half; i += 8) {
        const F8 a = F8::load(x + i), b = F8::load(x + half + i), c = F8::load(cos + i), s = F8::load(sin + i);
        (a * c - b * s).store(x + i);
        fma(b, c, a * s).store(x + half + i);
    }
    for (; i < half; i++) {
        const float a = x[i], b = x[half + i];
        x[i] = a * cos[i] - b * sin[i];
        x[half + i] = b * cos[i] + a * sin[i];
    }
}

// Normalises num_heads heads, each alone or all together, then rotates each.
inline void norm_and_rotate(float* x, int num_heads, const float* weight, const KvAttentionSpec& spec, const float* cos,
                            const float* sin) {
    if (weight && spec.full_width_norm) norm_in_place(x, weight, num_heads * spec.head_dim, spec.norm_eps);
    for (int h = 0; h < num_heads; h++) {
        float* head = x + h * spec.head_dim;
        if (weight && !spec.full_width_norm) norm_in_place(head, weight, spec.head_dim, spec.norm_eps);
        rotate_head(head, cos, sin, spec.rotary_dim);
    }
}

// Where one token's key, value and scales of one head lie; a key's dimensions lie block_size apart.
struct CacheSlot {
    int64_t key, value, scale;
};

inline void store_value(float v, uint16_t* p) { *p = float_to_half(v); }
inline void store_value(float v, float* p) { *p = v; }

template <class Cache>
inline void write_kv(const KvAttentionSpec& spec, const CacheSlot& at, const float* k, const float* v) {
    Cache* keys = (Cache*)spec.keys + at.key;
    Cache* values = (Cache*)spec.values + at.value;
    for (int d = 0; d < spec.head_dim; d++) store_value(k[d], keys + int64_t(d) * spec.block_size);
    for (int d = 0; d < spec.head_dim; d += 8) F8::load(v + d).store(values + d);
}

// Rounds to bytes; returns what one step is worth.
inline float quantize_bytes(const float* x, int count, int8_t* out) {
    const float largest = max_magnitude(x, count);
    const F8 inverse = F8::set1(largest > 0.0f ? 127.0f / largest : 0.0f);
    for (int i = 0; i < count; i += 8) store_int8(round(F8::load(x + i) * inverse), out + i);
    return largest / 127.0f;
}

template <>
inline void write_kv<int8_t>(const KvAttentionSpec& spec, const CacheSlot& at, const float* k, const float* v) {
    int8_t bytes[256];
    spec.key_scales[at.scale] = quantize_bytes(k, spec.head_dim, bytes);
    int8_t* keys = (int8_t*)spec.keys + at.key;
    for (int d = 0; d < spec.head_dim; d++) keys[int64_t(d) * spec.block_size] = bytes[d];
    spec.value_scales[at.scale] = quantize_bytes(v, spec.head_dim, (int8_t*)spec.values + at.value);
}

template <class Cache>
inline void rope_kv_rows(const KvOp& op, const KvBatch& batch, WorkQueue& queue) {
    const KvAttentionSpec& spec = *op.attention;
    const int head_dim = spec.head_dim, block_size = spec.block_size, half = spec.rotary_dim / 2;
    const int width = (spec.num_heads + 2 * spec.num_kv_heads) * head_dim;
    for (int row = queue.take(); row < batch.num_rows; row = queue.take()) {
        float* q = (float*)op.output + int64_t(row) * width;
        float* k = q + spec.num_heads * head_dim;
        const float* v = k + spec.num_kv_heads * head_dim;
        const int64_t angles = int64_t(spec.rope_by_row ? row : batch.positions[row]) * half;
        norm_and_rotate(q, spec.num_heads, spec.q_norm, spec, spec.cos + angles, spec.sin + angles);
        norm_and_rotate(k, spec.num_kv_heads, spec.k_norm, spec, spec.cos + angles, spec.sin + angles);
        const int64_t slot = batch.slot_mapping[row];
        if (slot < 0) continue;
        const int64_t offset = slot % block_size;
        for (int h = 0; h < spec.num_kv_heads; h++) {
            const int64_t first = (slot / block_size * spec.num_kv_heads + h) * block_size;
            const CacheSlot at{first * head_dim + offset, (first + offset) * head_dim, first + offset};
            write_kv<Cache>(spec, at, k + h * head_dim, v + h * head_dim);
        }
    }
}

inline void rope_kv(const KvOp& op, const KvBatch& batch, WorkQueue& queue) {
    switch (op.attention->cache_kind) {
        case KV_CACHE_F16: return rope_kv_rows<uint16_t>(op, batch, queue);
        case KV_CACHE_INT8: return rope_kv_rows<int8_t>(op, batch, queue);
        default: return rope_kv_rows<float>(op, batch, queue);
    }
}

}  // namespace KV_ISA
