// Matrix products over packed weights. Every row count runs the same arithmetic in
// the same order, so a token's result does not depend on what else is in the batch.
#pragma once

#include <algorithm>

#include "isa.h"
#include "tile_dot.h"

namespace KV_ISA {

inline F8 silu(F8 x) { return x / (F8::set1(1.0f) + exp(F8::zero() - x)); }
inline F8 tanh(F8 x) {
    const F8 e = exp(x + x);
    return F8::set1(1.0f) - F8::set1(2.0f) / (e + F8::set1(1.0f));
}
inline F8 soft_capped(F8 x, float cap) { return F8::set1(cap) * tanh(x / F8::set1(cap)); }
inline F8 gelu_tanh(F8 x) {
    const F8 inner = F8::set1(0.7978845608028654f) * fma(F8::set1(0.044715f) * x * x, x, x);
    return F8::set1(0.5f) * x * (F8::set1(1.0f) + tanh(inner));
}

inline F8 gated(const KvOp& op, F8 gate, F8 up) {
    if (op.epilogue == KV_SWIGLU) return silu(gate) * up;
    if (op.epilogue == KV_GEGLU) return gelu_tanh(gate) * up;
    const F8 one = F8::set1(1.0f), limit = F8::set1(op.soft_cap);
    const F8 g = min(gate, limit), u = max(min(up, limit), F8::zero() - limit);
    return g / (one + exp(F8::zero() - F8::set1(op.factor) * g)) * (u + one);
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

// Calls f with a pointer whose type says which view reads a weight format.
template <class Function>
inline void with_view(int format, Function f) {
    switch (format) {
        case KV_Q4_F16: return f((Q4View<Half>*)nullptr);
        case KV_Q4_F32: return f((Q4View<float>*)nullptr);
        case KV_Q8_F16: return f((Q8View<Half>*)nullptr);
        case KV_Q8_F32: return f((Q8View<float>*)nullptr);
        case KV_Q8_MIN_F32: return f((Q8MinView*)nullptr);
        case KV_DENSE_F32: return f((DenseView<float>*)nullptr);
        case KV_DENSE_F16: return f((DenseView<Half>*)nullptr);
        case KV_DENSE_BF16: return f((DenseView<BFloat16>*)nullptr);
        case KV_Q4_0: return f((Q4_0View*)nullptr);
        case KV_Q5_0: return f((Q5_0View*)nullptr);
        case KV_Q5_1: return f((Q5_1View*)nullptr);
        case KV_Q2_K: return f((Q2KView*)nullptr);
        case KV_Q3_K: return f((Q3KView*)nullptr);
        case KV_Q4_K: return f((Q4KView*)nullptr);
        case KV_Q5_K: return f((Q5KView*)nullptr);
        case KV_Q6_K: return f((Q6KView*)nullptr);
        case KV_IQ4_NL: return f((IQ4NLView*)nullptr);
        case KV_IQ4_XS: return f((IQ4XSView*)nullptr);
        case KV_MXFP4: return f((MXFP4View*)nullptr);
    }
}

// Without vector registers, more rows at a time would only be more to compile.
#if defined(KV_X86) || defined(KV_NEON)
constexpr bool HAS_VECTORS = true;
#else
constexpr bool HAS_VECTORS = false;
#endif

inline int rows_at_once(int left) {
    if (HAS_VECTORS) return left >= 8 ? 8 : left >= 4 ? 4 : left;
    return left >= 4 ? 4 : 1;
}

// The outputs of one tile of a weight for `count` activation rows, as many as `dot` computes.
inline void tile_rows(const KvOp& op, TileDot dot, int64_t tile_bytes, int blocks, int tile, const ActivationRows& x,
                      int first, int count) {
    const KvWeight& weight = *op.weight;
    const char* weights = (const char*)weight.data;
    F8 acc[8];
    dot(weights + tile_bytes * tile, blocks, x, first, acc);
    if (is_paired(op)) {
        F8 up[8];
        const int width = weight.rows / 2, stride = op.output_stride ? op.output_stride : width;
        dot(weights + tile_bytes * (tile + width / KV_TILE), blocks, x, first, up);
        const F8 gate_bias = load_bias(op.bias, KV_TILE * tile, KV_TILE);
        const F8 up_bias = load_bias(op.bias, width + KV_TILE * tile, KV_TILE);
        for (int r = 0; r < count; r++) {
            const F8 out = gated(op, acc[r] + gate_bias, up[r] + up_bias);
            out.store((float*)op.output + int64_t(first + r) * stride + KV_TILE * tile);
        }
        return;
    }
    const int lanes = std::min<int>(KV_TILE, weight.rows - KV_TILE * tile);
    const int stride = op.output_stride ? op.output_stride : weight.rows;
    const F8 bias = load_bias(op.bias, KV_TILE * tile, lanes), factor = F8::set1(op.factor);
    for (int r = 0; r < count; r++) {
        F8 result = (acc[r] + bias) * factor;
        if (op.soft_cap > 0.0f) result = soft_capped(result, op.soft_cap);
        store_lanes(result, (float*)op.output + int64_t(first + r) * stride + KV_TILE * tile, lanes,
                    op.epilogue == KV_ADD);
    }
}

inline void matmul(const KvOp& op, int num_rows, WorkQueue& queue) {
    const KvWeight& weight = *op.weight;
    const ActivationRows x{*op.activation};
    TileDot dots[9] = {};
    int blocks = 0;
    int64_t tile_bytes = 0;
    with_view(weight.format, [&]<class View>(View*) {
        dots[1] = tile_dot<1, View>;
        dots[4] = tile_dot<4, View>;
        if constexpr (HAS_VECTORS) {
            dots[2] = tile_dot<2, View>;
            dots[3] = tile_dot<3, View>;
            dots[8] = tile_dot<8, View>;
        }
        blocks = weight.columns / (KV_GROUP * View::GROUPS);
        tile_bytes = int64_t(sizeof(typename View::Tile)) * blocks;
    });
    const int tiles = (weight.rows + KV_TILE - 1) / KV_TILE / (is_paired(op) ? 2 : 1);
    // A block of rows stays in the second-level cache while the tiles stream past it.
    const int row_block = 64;
    const int row_blocks = (num_rows + row_block - 1) / row_block;
    const int tile_block = std::max(1, std::min(32, tiles / 16));
    const int tile_blocks = (tiles + tile_block - 1) / tile_block;
    for (int chunk = queue.take(); chunk < row_blocks * tile_blocks; chunk = queue.take()) {
        const int row_begin = chunk / tile_blocks * row_block, row_end = std::min(num_rows, row_begin + row_block);
        const int tile_begin = chunk % tile_blocks * tile_block, tile_end = std::min(tiles, tile_begin + tile_block);
        for (int tile = tile_begin; tile < tile_end; tile++)
            for (int row = row_begin, left = row_end - row; left > 0; left = row_end - row) {
                const int count = rows_at_once(left);
                tile_rows(op, dots[count], tile_bytes, blocks, tile, x, row, count);
                row += count;
            }
    }
}

template <class View>
inline void dequantize_rows(const KvWeight& weight, int first, int count, float* out) {
    const int blocks = weight.columns / (KV_GROUP * View::GROUPS);
    for (int row = first; row < first + count; row++) {
        const auto* tile = (const typename View::Tile*)weight.data + int64_t(row / KV_TILE) * blocks;
        for (int g = 0; g < blocks * View::GROUPS; g++, out += KV_GROUP)
            dequantize_group(View(tile[g / View::GROUPS], g % View::GROUPS), row % KV_TILE, out);
    }
}

inline void dequantize(const KvWeight& weight, int32_t first, int32_t count, float* out) {
    with_view(weight.format, [&]<class View>(View*) { dequantize_rows<View>(weight, first, count, out); });
}

}  // namespace KV_ISA
