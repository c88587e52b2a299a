// Matrix products over packed weights. Every row count runs the same arithmetic in
// the same order, so a token's result does not depend on what else is in the batch.
#pragma once

#include <algorithm>

#include "isa.h"
#include "simd.h"

namespace KV_ISA {

template <class Scale>
struct Nibble32 {
    Scale scale[KV_TILE];
    Scale minimum[KV_TILE];
    uint8_t bytes[128];
};
template <class Scale>
struct Byte32 {
    Scale scale[KV_TILE];
    int8_t bytes[256];
};
template <class Value>
struct Dense32 {
    Value values[256];
};

// Rows of an activation, seen from one matrix product.
struct ActivationRows {
    const KvActivationBuffer& buffer;
    template <class Value>
    const Value* values(int row) const {
        return (const Value*)buffer.values + int64_t(row) * buffer.columns;
    }
    const float* scales(int row) const { return buffer.scales + int64_t(row) * (buffer.columns / KV_GROUP); }
    const float* sums(int row) const { return buffer.scaled_sums + int64_t(row) * (buffer.columns / KV_GROUP); }
};

// acc[r] = the 8 outputs of one tile for activation row first + r.
template <int R, class Dot, class Scale>
inline void nibble_dot(const Nibble32<Scale>* tile, int groups, const ActivationRows& x, int first, F8 (&acc)[R]) {
    constexpr int bytes = Dot::BYTES_PER_COLUMN;
    const int8_t* q[R];
    const float *scale[R], *sum[R];
    for (int r = 0; r < R; r++) {
        q[r] = x.values<int8_t>(bytes * (first + r));
        scale[r] = x.scales(first + r);
        sum[r] = x.sums(first + r);
        acc[r] = F8::zero();
    }
    for (int g = 0; g < groups; g++) {
        const Nibble32<Scale>& w = tile[g];
        Dot dot[R];
        for (int s = 0; s < 4; s++) {
            Nibbles low, high;
            load_nibbles(w.bytes + 32 * s, low, high);
            for (int r = 0; r < R; r++) {
                dot[r].add(low, q[r] + bytes * (KV_GROUP * g + 4 * s));
                dot[r].add(high, q[r] + bytes * (KV_GROUP * g + 16 + 4 * s));
            }
        }
        const F8 d = F8::load(w.scale), m = F8::load(w.minimum);
        for (int r = 0; r < R; r++) {
            acc[r] = fma(dot[r].finish() * F8::set1(scale[r][g]), d, acc[r]);
            acc[r] = fma(m, F8::set1(sum[r][g]), acc[r]);
        }
    }
}

template <int R, class Scale>
inline void tile_dot(const Nibble32<Scale>* tile, int groups, const ActivationRows& x, int first, F8 (&acc)[R]) {
    if (x.buffer.kind == KV_ACT_INT8)
        nibble_dot<R, NibbleDot>(tile, groups, x, first, acc);
    else
        nibble_dot<R, NibbleDotPair>(tile, groups, x, first, acc);
}

template <int R, class Scale>
inline void tile_dot(const Byte32<Scale>* tile, int groups, const ActivationRows& x, int first, F8 (&acc)[R]) {
    const int16_t* q[R];
    const float* scale[R];
    for (int r = 0; r < R; r++) {
        q[r] = x.values<int16_t>(first + r);
        scale[r] = x.scales(first + r);
        acc[r] = F8::zero();
    }
    for (int g = 0; g < groups; g++) {
        const Byte32<Scale>& w = tile[g];
        ByteDot dot[R];
        for (int s = 0; s < 16; s++) {
            const BytePairs pairs = load_byte_pairs(w.bytes + 16 * s);
            for (int r = 0; r < R; r++) dot[r].add(pairs, q[r] + KV_GROUP * g + 2 * s);
        }
        const F8 d = F8::load(w.scale);
        for (int r = 0; r < R; r++) acc[r] = fma(dot[r].finish() * F8::set1(scale[r][g]), d, acc[r]);
    }
}

template <int R, class Value>
inline void tile_dot(const Dense32<Value>* tile, int groups, const ActivationRows& x, int first, F8 (&acc)[R]) {
    const float* v[R];
    F8 odd[R];
    for (int r = 0; r < R; r++) {
        v[r] = x.values<float>(first + r);
        acc[r] = odd[r] = F8::zero();
    }
    for (int g = 0; g < groups; g++) {
        const Value* w = tile[g].values;
        for (int c = 0; c < KV_GROUP; c += 2) {
            const F8 even_column = F8::load(w + KV_TILE * c), odd_column = F8::load(w + KV_TILE * (c + 1));
            for (int r = 0; r < R; r++) {
                acc[r] = fma(even_column, F8::set1(v[r][KV_GROUP * g + c]), acc[r]);
                odd[r] = fma(odd_column, F8::set1(v[r][KV_GROUP * g + c + 1]), odd[r]);
            }
        }
    }
    for (int r = 0; r < R; r++) acc[r] = acc[r] + odd[r];
}

inline F8 silu(F8 x) { return x / (F8::set1(1.0f) + exp(F8::zero() - x)); }
inline F8 tanh(F8 x) {
    const F8 e = exp(x + x);
    return F8::set1(1.0f) - F8::set1(2.0f) / (e + F8::set1(1.0f));
}
inline F8 gelu_tanh(F8 x) {
    const F8 inner = F8::set1(0.7978845608028654f) * fma(F8::set1(0.044715f) * x * x, x, x);
    return F8::set1(0.5f) * x * (F8::set1(1.0f) + tanh(inner));
}

// Stores or adds the first `count` lanes.
inline void store_lanes(F8 value, float* out, int count, bool add) {
    if (count >= KV_TILE) {
        (add ? F8::load(out) + value : value).store(out);
        return;
    }
    float lanes[KV_TILE];
    value.store(lanes);
    for (int i = 0; i < count; i++) out[i] = add ? out[i] + lanes[i] : lanes[i];
}

inline F8 load_bias(const float* bias, int first, int count) {
    if (!bias) return F8::zero();
    if (count >= KV_TILE) return F8::load(bias + first);
    float lanes[KV_TILE] = {};
    std::memcpy(lanes, bias + first, sizeof(float) * count);
    return F8::load(lanes);
}

template <int R, class Group>
inline void tile_rows(const KvOp& op, const Group* weights, int groups, int tile, const ActivationRows& x, int first) {
    const KvWeight& weight = *op.weight;
    F8 acc[R];
    if (op.epilogue == KV_SWIGLU || op.epilogue == KV_GEGLU) {
        F8 up[R];
        const int width = weight.rows / 2, stride = op.output_stride ? op.output_stride : width;
        tile_dot<R>(weights + int64_t(tile) * groups, groups, x, first, acc);
        tile_dot<R>(weights + int64_t(tile + width / KV_TILE) * groups, groups, x, first, up);
        for (int r = 0; r < R; r++) {
            const F8 gate = op.epilogue == KV_SWIGLU ? silu(acc[r]) : gelu_tanh(acc[r]);
            (gate * up[r]).store((float*)op.output + int64_t(first + r) * stride + KV_TILE * tile);
        }
        return;
    }
    tile_dot<R>(weights + int64_t(tile) * groups, groups, x, first, acc);
    const int count = std::min<int>(KV_TILE, weight.rows - KV_TILE * tile);
    const int stride = op.output_stride ? op.output_stride : weight.rows;
    const F8 bias = load_bias(op.bias, KV_TILE * tile, count);
    for (int r = 0; r < R; r++)
        store_lanes(acc[r] + bias, (float*)op.output + int64_t(first + r) * stride + KV_TILE * tile, count,
                    op.epilogue == KV_ADD);
}

template <class Group>
inline void matmul_groups(const KvOp& op, int num_rows, WorkQueue& queue) {
    const KvWeight& weight = *op.weight;
    const Group* weights = (const Group*)weight.data;
    const ActivationRows x{*op.activation};
    const int groups = weight.columns / KV_GROUP;
    const bool paired = op.epilogue == KV_SWIGLU || op.epilogue == KV_GEGLU;
    const int tiles = (weight.rows + KV_TILE - 1) / KV_TILE / (paired ? 2 : 1);
    // A block of rows stays in the second-level cache while the tiles stream past it.
    const int row_block = 64;
    const int row_blocks = (num_rows + row_block - 1) / row_block;
    const int tile_block = std::max(1, std::min(32, tiles / 16));
    const int tile_blocks = (tiles + tile_block - 1) / tile_block;
    for (int chunk = queue.take(); chunk < row_blocks * tile_blocks; chunk = queue.take()) {
        const int row_begin = chunk / tile_blocks * row_block, row_end = std::min(num_rows, row_begin + row_block);
        const int tile_begin = chunk % tile_blocks * tile_block, tile_end = std::min(tiles, tile_begin + tile_block);
        for (int tile = tile_begin; tile < tile_end; tile++) {
            int row = row_begin;
            for (; row + 8 <= row_end; row += 8) tile_rows<8>(op, weights, groups, tile, x, row);
            for (; row + 4 <= row_end; row += 4) tile_rows<4>(op, weights, groups, tile, x, row);
            switch (row_end - row) {
                case 3: tile_rows<3>(op, weights, groups, tile, x, row); break;
                case 2: tile_rows<2>(op, weights, groups, tile, x, row); break;
                case 1: tile_rows<1>(op, weights, groups, tile, x, row); break;
                default: break;
            }
        }
    }
}

inline void matmul(const KvOp& op, int num_rows, WorkQueue& queue) {
    switch (op.weight->format) {
        case KV_Q4_F16: return matmul_groups<Nibble32<uint16_t>>(op, num_rows, queue);
        case KV_Q4_F32: return matmul_groups<Nibble32<float>>(op, num_rows, queue);
        case KV_Q8_F16: return matmul_groups<Byte32<uint16_t>>(op, num_rows, queue);
        case KV_Q8_F32: return matmul_groups<Byte32<float>>(op, num_rows, queue);
        case KV_DENSE_F32: return matmul_groups<Dense32<float>>(op, num_rows, queue);
        case KV_DENSE_F16: return matmul_groups<Dense32<uint16_t>>(op, num_rows, queue);
        case KV_DENSE_BF16: return matmul_groups<Dense32<BFloat16>>(op, num_rows, queue);
    }
}

inline float scale_at(const uint16_t* p) { return half_to_float(*p); }
inline float scale_at(const float* p) { return *p; }
inline float scale_at(const BFloat16* p) { return p->value(); }

template <class Scale>
inline void dequantize_group(const Nibble32<Scale>& w, int r, float* out) {
    const float d = scale_at(w.scale + r), m = scale_at(w.minimum + r);
    for (int c = 0; c < 16; c++) {
        const uint8_t byte = w.bytes[32 * (c / 4) + 4 * r + c % 4];
        out[c] = d * float(byte & 15) + m;
        out[c + 16] = d * float(byte >> 4) + m;
    }
}
template <class Scale>
inline void dequantize_group(const Byte32<Scale>& w, int r, float* out) {
    const float d = scale_at(w.scale + r);
    for (int c = 0; c < KV_GROUP; c++) out[c] = d * float(w.bytes[16 * (c / 2) + 2 * r + c % 2]);
}
template <class Value>
inline void dequantize_group(const Dense32<Value>& w, int r, float* out) {
    for (int c = 0; c < KV_GROUP; c++) out[c] = scale_at(w.values + KV_TILE * c + r);
}

template <class Group>
inline void dequantize_rows(const KvWeight& weight, int first, int count, float* out) {
    const int groups = weight.columns / KV_GROUP;
    for (int i = 0; i < count; i++) {
        const int row = first + i;
        const Group* tile = (const Group*)weight.data + int64_t(row / KV_TILE) * groups;
        for (int g = 0; g < groups; g++)
            dequantize_group(tile[g], row % KV_TILE, out + int64_t(i) * weight.columns + KV_GROUP * g);
    }
}

inline void dequantize(const KvWeight& weight, int32_t first, int32_t count, float* out) {
    switch (weight.format) {
        case KV_Q4_F16: return dequantize_rows<Nibble32<uint16_t>>(weight, first, count, out);
        case KV_Q4_F32: return dequantize_rows<Nibble32<float>>(weight, first, count, out);
        case KV_Q8_F16: return dequantize_rows<Byte32<uint16_t>>(weight, first, count, out);
        case KV_Q8_F32: return dequantize_rows<Byte32<float>>(weight, first, count, out);
        case KV_DENSE_F32: return dequantize_rows<Dense32<float>>(weight, first, count, out);
        case KV_DENSE_F16: return dequantize_rows<Dense32<uint16_t>>(weight, first, count, out);
        case KV_DENSE_BF16: return dequantize_rows<Dense32<BFloat16>>(weight, first, count, out);
    }
}

}  // namespace KV_ISA
