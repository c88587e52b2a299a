// Embedding, norm, activation quantisation, rotary embedding with the KV write.
#pragma once

#include "matmul.h"

namespace KV_ISA {

inline float max_magnitude(const float* x, int count) {
    F8 m = F8::zero();
    for (int i = 0; i < count; i += 8) m = max(m, abs(F8::load(x + i)));
    return max_lane(m);
}

inline void store_byte_pairs(const int16_t* wide, int8_t* out) {
    for (int i = 0; i < 8; i++) {
        int8_t* four = out + 8 * (i / 4) + i % 4;
        four[0] = int8_t((wide[i] + 128) >> 8);
        four[4] = int8_t(wide[i] & 0xff);
    }
}

// Quantises one row group by group, or copies it where the matrix product takes floats.
inline void quantize_row(const float* x, const KvActivationBuffer& out, int row) {
    const int columns = out.columns, groups = columns / KV_GROUP;
    if (out.kind == KV_ACT_F32) {
        std::memcpy((float*)out.values + int64_t(row) * columns, x, sizeof(float) * columns);
        return;
    }
    float* scales = out.scales + int64_t(row) * groups;
    // 32639 = 256 * 127 + 127: the largest value whose high byte is one.
    const float limit = out.kind == KV_ACT_INT8 ? 127.0f : out.kind == KV_ACT_INT16 ? 32767.0f : 32639.0f;
    for (int g = 0; g < groups; g++) {
        const float* group = x + KV_GROUP * g;
        const float largest = max_magnitude(group, KV_GROUP);
        const F8 inverse = F8::set1(largest > 0.0f ? limit / largest : 0.0f);
        scales[g] = largest / limit;
        F8 total = F8::zero();
        for (int i = 0; i < KV_GROUP; i += 8) {
            const F8 rounded = round(F8::load(group + i) * inverse);
            total = total + rounded;
            const int64_t at = int64_t(row) * columns + KV_GROUP * g + i;
            if (out.kind == KV_ACT_INT8) {
                store_int8(rounded, (int8_t*)out.values + at);
            } else if (out.kind == KV_ACT_INT16) {
                store_int16(rounded, (int16_t*)out.values + at);
            } else {
                int16_t wide[8];
                store_int16(rounded, wide);
                store_byte_pairs(wide, (int8_t*)out.values + 2 * at);
            }
        }
        if (out.scaled_sums) out.scaled_sums[int64_t(row) * groups + g] = scales[g] * sum(total);
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
        if (op.activation)
            quantize_row(normed, *op.activation, row);
        else
            std::memcpy((float*)op.output + int64_t(row) * op.columns, normed, sizeof(float) * op.columns);
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

inline void norm_head(float* x, const float* weight, int count, float epsilon) {
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

inline void store_value(float v, uint16_t* p) { *p = float_to_half(v); }
inline void store_value(float v, float* p) { *p = v; }

template <class Cache>
inline void rope_kv_rows(const KvOp& op, const KvBatch& batch, WorkQueue& queue) {
    const KvAttentionSpec& spec = *op.attention;
    const int head_dim = spec.head_dim, block_size = spec.block_size, half = spec.rotary_dim / 2;
    const int width = (spec.num_heads + 2 * spec.num_kv_heads) * head_dim;
    for (int row = queue.take(); row < batch.num_rows; row = queue.take()) {
        float* q = (float*)op.output + int64_t(row) * width;
        float* k = q + spec.num_heads * head_dim;
        const float* v = k + spec.num_kv_heads * head_dim;
        const float* cos = spec.cos + int64_t(batch.positions[row]) * half;
        const float* sin = spec.sin + int64_t(batch.positions[row]) * half;
        for (int h = 0; h < spec.num_heads; h++) {
            if (spec.q_norm) norm_head(q + h * head_dim, spec.q_norm, head_dim, spec.norm_eps);
            rotate_head(q + h * head_dim, cos, sin, spec.rotary_dim);
        }
        const int64_t slot = batch.slot_mapping[row];
        for (int h = 0; h < spec.num_kv_heads; h++) {
            float* key = k + h * head_dim;
            if (spec.k_norm) norm_head(key, spec.k_norm, head_dim, spec.norm_eps);
            rotate_head(key, cos, sin, spec.rotary_dim);
            if (slot < 0) continue;
            const int64_t head_at = (slot / block_size * spec.num_kv_heads + h) * block_size * head_dim;
            const int offset = int(slot % block_size);
            Cache* keys = (Cache*)spec.keys + head_at + offset;
            Cache* values = (Cache*)spec.values + head_at + int64_t(offset) * head_dim;
            for (int d = 0; d < head_dim; d++) store_value(key[d], keys + int64_t(d) * block_size);
            for (int d = 0; d < head_dim; d += 8) F8::load(v + h * head_dim + d).store(values + d);
        }
    }
}

inline void rope_kv(const KvOp& op, const KvBatch& batch, WorkQueue& queue) {
    if (op.attention->kv_is_half)
        rope_kv_rows<uint16_t>(op, batch, queue);
    else
        rope_kv_rows<float>(op, batch, queue);
}

}  // namespace KV_ISA
