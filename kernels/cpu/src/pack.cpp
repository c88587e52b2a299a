#include <cstring>

#include "tiles.h"

namespace {

// Blocks of GGUF files: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
// Q4, Q5, IQ4 and MXFP4: byte i holds column i low and column i + 16 high.
struct SourceQ4_0 {
    uint8_t scale[2], codes[16];
};
struct SourceQ4_1 {
    uint8_t scale[2], minimum[2], codes[16];
};
struct SourceQ5_0 {
    uint8_t scale[2], high[4], codes[16];
};
struct SourceQ5_1 {
    uint8_t scale[2], minimum[2], high[4], codes[16];
};
struct SourceQ8_0 {
    uint8_t scale[2];
    int8_t bytes[32];
};
struct SourceMXFP4 {
    uint8_t exponent, codes[16];
};
struct SourceQ2K {
    uint8_t scales[16], codes[64], d[2], dmin[2];
};
struct SourceQ3K {
    uint8_t high[32], codes[64], scales[12], d[2];
};
struct SourceQ4K {
    uint8_t d[2], dmin[2], scales[12], codes[128];
};
struct SourceQ5K {
    uint8_t d[2], dmin[2], scales[12], high[32], codes[128];
};
struct SourceQ6K {
    uint8_t low[128], high[64];
    int8_t scales[16];
    uint8_t d[2];
};
struct SourceIQ4XS {
    uint8_t d[2], scales_high[2], scales_low[4], codes[128];
};

uint16_t read_half(const uint8_t* p) { return uint16_t(p[0] | p[1] << 8); }

// Places row r's 32 codes of 4 bits, given as they lie in a file's bytes.
void place_nibbles(uint8_t* plane, int r, const uint8_t* bytes) {
    for (int s = 0; s < 4; s++) std::memcpy(plane + 32 * s + 4 * r, bytes + 4 * s, 4);
}
// Places the low 4, 2 or 1 bits of row r's 32 codes.
void place_4_bits(uint8_t* plane, int r, const uint8_t* codes) {
    uint8_t bytes[16];
    for (int i = 0; i < 16; i++) bytes[i] = uint8_t((codes[i] & 15) | codes[i + 16] << 4);
    place_nibbles(plane, r, bytes);
}
void place_2_bits(uint8_t* plane, int r, const uint8_t* codes) {
    uint8_t bytes[8];
    for (int i = 0; i < 8; i++)
        bytes[i] = uint8_t((codes[i] & 3) | (codes[i + 8] & 3) << 2 | (codes[i + 16] & 3) << 4 | codes[i + 24] << 6);
    for (int i = 0; i < 2; i++) std::memcpy(plane + 32 * i + 4 * r, bytes + 4 * i, 4);
}
void place_1_bit(uint8_t* plane, int r, const uint8_t* codes) {
    for (int j = 0; j < 4; j++) {
        int byte = 0;
        for (int s = 0; s < 8; s++) byte |= (codes[4 * s + j] & 1) << s;
        plane[4 * r + j] = uint8_t(byte);
    }
}
void place_byte_pairs(int8_t* bytes, int r, const int8_t* from) {
    for (int c = 0; c < KV_GROUP; c++) bytes[16 * (c / 2) + 2 * r + c % 2] = from[c];
}
void place_nibble_pairs(uint8_t* bytes, int r, const uint8_t* from) {
    for (int c = 0; c < 16; c++) bytes[16 * (c / 2) + 2 * r + c % 2] = from[c];
}

void shift_right(const uint8_t* from, int count, int by, uint8_t* to) {
    for (int i = 0; i < count; i++) to[i] = uint8_t(from[i] >> by);
}
// The fifth bits of 32 columns: to[c] = bit c of a little-endian word.
void spread_bits(const uint8_t* word, uint8_t* to) {
    for (int c = 0; c < 32; c++) to[c] = word[c / 8] >> c % 8 & 1;
}

void place(const SourceQ4_0& from, TileQ4_0& to, int r) {
    to.scale[r] = read_half(from.scale);
    place_nibbles(to.codes, r, from.codes);
}
void place(const SourceQ4_1& from, TileQ4<Half>& to, int r) {
    to.scale[r] = read_half(from.scale);
    to.minimum[r] = read_half(from.minimum);
    place_nibbles(to.codes, r, from.codes);
}
void place(const SourceQ5_0& from, TileQ5_0& to, int r) {
    uint8_t high[KV_GROUP];
    to.scale[r] = read_half(from.scale);
    place_nibbles(to.low, r, from.codes);
    spread_bits(from.high, high);
    place_1_bit(to.high, r, high);
}
void place(const SourceQ5_1& from, TileQ5_1& to, int r) {
    uint8_t high[KV_GROUP];
    to.scale[r] = read_half(from.scale);
    to.minimum[r] = read_half(from.minimum);
    place_nibbles(to.low, r, from.codes);
    spread_bits(from.high, high);
    place_1_bit(to.high, r, high);
}
void place(const SourceQ8_0& from, TileQ8<Half>& to, int r) {
    to.scale[r] = read_half(from.scale);
    place_byte_pairs(to.bytes, r, from.bytes);
}
void place(const SourceMXFP4& from, TileMXFP4& to, int r) {
    // 2^(exponent - 128); the two smallest are subnormal.
    to.scale[r] = uint16_t(from.exponent < 2 ? 0x20 << from.exponent : (from.exponent - 1) << 7);
    place_nibbles(to.codes, r, from.codes);
}
void place(const SourceQ4_0& from, TileIQ4NL& to, int r) {  // IQ4_NL has the same fields
    to.scale[r] = read_half(from.scale);
    place_nibble_pairs(to.codes, r, from.codes);
}

void place(const SourceQ2K& from, TileQ2K& to, int r) {
    to.d[r] = read_half(from.d);
    to.dmin[r] = read_half(from.dmin);
    for (int i = 0; i < 16; i++) to.scales[i][r] = from.scales[i];
    for (int g = 0; g < BLOCK_GROUPS; g++) {
        uint8_t codes[KV_GROUP];
        shift_right(from.codes + 32 * (g / 4), KV_GROUP, 2 * (g % 4), codes);
        place_2_bits(to.codes[g], r, codes);
    }
}
void place(const SourceQ3K& from, TileQ3K& to, int r) {
    to.d[r] = read_half(from.d);
    for (int i = 0; i < 16; i++) {
        const int low = from.scales[i % 8] >> 4 * (i / 8) & 15, high = from.scales[8 + i % 4] >> 2 * (i / 4) & 3;
        to.scales[i][r] = int8_t((low | high << 4) - 32);
    }
    for (int g = 0; g < BLOCK_GROUPS; g++) {
        uint8_t codes[KV_GROUP], high[KV_GROUP];
        shift_right(from.codes + 32 * (g / 4), KV_GROUP, 2 * (g % 4), codes);
        shift_right(from.high, KV_GROUP, g, high);
        place_2_bits(to.groups[g].low, r, codes);
        place_1_bit(to.groups[g].high, r, high);
    }
}
template <class Tile>
void place_six_bit_pairs(const uint8_t* from, Tile& to, int r) {
    for (int g = 0; g < 4; g++) {
        to.scales[g][r] = from[g] & 63;
        to.minima[g][r] = from[4 + g] & 63;
        to.scales[4 + g][r] = uint8_t((from[8 + g] & 15) | from[g] >> 6 << 4);
        to.minima[4 + g][r] = uint8_t(from[8 + g] >> 4 | from[4 + g] >> 6 << 4);
    }
}
void place(const SourceQ4K& from, TileQ4K& to, int r) {
    to.d[r] = read_half(from.d);
    to.dmin[r] = read_half(from.dmin);
    place_six_bit_pairs(from.scales, to, r);
    for (int g = 0; g < BLOCK_GROUPS; g++) {
        uint8_t codes[KV_GROUP];
        shift_right(from.codes + 32 * (g / 2), KV_GROUP, 4 * (g % 2), codes);
        place_4_bits(to.codes[g], r, codes);
    }
}
void place(const SourceQ5K& from, TileQ5K& to, int r) {
    to.d[r] = read_half(from.d);
    to.dmin[r] = read_half(from.dmin);
    place_six_bit_pairs(from.scales, to, r);
    for (int g = 0; g < BLOCK_GROUPS; g++) {
        uint8_t codes[KV_GROUP], high[KV_GROUP];
        shift_right(from.codes + 32 * (g / 2), KV_GROUP, 4 * (g % 2), codes);
        shift_right(from.high, KV_GROUP, g, high);
        place_4_bits(to.groups[g].low, r, codes);
        place_1_bit(to.groups[g].high, r, high);
    }
}
void place(const SourceQ6K& from, TileQ6K& to, int r) {
    to.d[r] = read_half(from.d);
    for (int i = 0; i < 16; i++) to.scales[i][r] = from.scales[i];
    for (int g = 0; g < BLOCK_GROUPS; g++) {
        uint8_t codes[KV_GROUP], high[KV_GROUP];
        shift_right(from.low + 64 * (g / 4) + 32 * (g % 2), KV_GROUP, 4 * (g / 2 % 2), codes);
        shift_right(from.high + 32 * (g / 4), KV_GROUP, 2 * (g % 4), high);
        place_4_bits(to.groups[g].low, r, codes);
        place_2_bits(to.groups[g].high, r, high);
    }
}
void place(const SourceIQ4XS& from, TileIQ4XS& to, int r) {
    to.d[r] = read_half(from.d);
    const int high = read_half(from.scales_high);
    for (int g = 0; g < BLOCK_GROUPS; g++) {
        const int low = from.scales_low[g / 2] >> 4 * (g % 2) & 15;
        to.scales[g][r] = int8_t((low | (high >> 2 * g & 3) << 4) - 32);
        place_nibble_pairs(to.codes[g], r, from.codes + 16 * g);
    }
}

template <class Source, class Tile>
void pack_blocks(const void* source, int32_t rows, int32_t blocks, void* packed) {
    const int64_t tiles = (rows + KV_TILE - 1) / KV_TILE;
    std::memset(packed, 0, sizeof(Tile) * tiles * blocks);
    for (int row = 0; row < rows; row++) {
        const Source* from = (const Source*)source + int64_t(row) * blocks;
        Tile* to = (Tile*)packed + int64_t(row / KV_TILE) * blocks;
        for (int b = 0; b < blocks; b++) place(from[b], to[b], row % KV_TILE);
    }
}

template <class Value>
void pack_dense(const void* source, int32_t rows, int32_t columns, void* packed) {
    const int tiles = (rows + KV_TILE - 1) / KV_TILE;
    std::memset(packed, 0, sizeof(Value) * int64_t(tiles) * KV_TILE * columns);
    for (int row = 0; row < rows; row++) {
        const Value* from = (const Value*)source + int64_t(row) * columns;
        Value* to = (Value*)packed + int64_t(row / KV_TILE) * KV_TILE * columns + row % KV_TILE;
        for (int c = 0; c < columns; c++) to[int64_t(c) * KV_TILE] = from[c];
    }
}

}  // namespace

TileShape tile_shape(int32_t format) {
    switch (format) {
        case KV_Q4_F16: return {KV_GROUP, sizeof(TileQ4<Half>)};
        case KV_Q4_F32: return {KV_GROUP, sizeof(TileQ4<float>)};
        case KV_Q4_0: return {KV_GROUP, sizeof(TileQ4_0)};
        case KV_Q5_0: return {KV_GROUP, sizeof(TileQ5_0)};
        case KV_Q5_1: return {KV_GROUP, sizeof(TileQ5_1)};
        case KV_MXFP4: return {KV_GROUP, sizeof(TileMXFP4)};
        case KV_Q8_F16: return {KV_GROUP, sizeof(TileQ8<Half>)};
        case KV_Q8_F32: return {KV_GROUP, sizeof(TileQ8<float>)};
        case KV_Q8_MIN_F32: return {KV_GROUP, sizeof(TileQ8Min)};
        case KV_IQ4_NL: return {KV_GROUP, sizeof(TileIQ4NL)};
        case KV_DENSE_F32: return {KV_GROUP, sizeof(TileDense<float>)};
        case KV_DENSE_F16:
        case KV_DENSE_BF16: return {KV_GROUP, sizeof(TileDense<uint16_t>)};
        case KV_Q2_K: return {BLOCK, sizeof(TileQ2K)};
        case KV_Q3_K: return {BLOCK, sizeof(TileQ3K)};
        case KV_Q4_K: return {BLOCK, sizeof(TileQ4K)};
        case KV_Q5_K: return {BLOCK, sizeof(TileQ5K)};
        case KV_Q6_K: return {BLOCK, sizeof(TileQ6K)};
        case KV_IQ4_XS: return {BLOCK, sizeof(TileIQ4XS)};
        default: return {KV_GROUP, 0};
    }
}

bool is_dense(int32_t format) {
    return format == KV_DENSE_F32 || format == KV_DENSE_F16 || format == KV_DENSE_BF16;
}

bool multiplies_bytes(int32_t format) {
    switch (format) {
        case KV_Q4_F16:
        case KV_Q4_F32:
        case KV_Q4_0:
        case KV_Q5_0:
        case KV_Q5_1:
        case KV_MXFP4:
        case KV_Q2_K:
        case KV_Q3_K:
        case KV_Q4_K:
        case KV_Q5_K:
        case KV_Q6_K: return true;
        default: return false;
    }
}

extern "C" {

int64_t kv_packed_bytes(int32_t format, int32_t rows, int32_t columns) {
    const TileShape tile = tile_shape(format);
    if (tile.bytes == 0 || rows <= 0 || columns <= 0 || columns % tile.columns) return -1;
    return int64_t(tile.bytes) * ((int64_t(rows) + KV_TILE - 1) / KV_TILE) * (columns / tile.columns);
}

int32_t kv_packed_format(int32_t source_format) {
    switch (source_format) {
        case KV_SOURCE_Q4_0: return KV_Q4_0;
        case KV_SOURCE_Q4_1: return KV_Q4_F16;
        case KV_SOURCE_Q5_0: return KV_Q5_0;
        case KV_SOURCE_Q5_1: return KV_Q5_1;
        case KV_SOURCE_Q8_0: return KV_Q8_F16;
        case KV_SOURCE_F32: return KV_DENSE_F32;
        case KV_SOURCE_F16: return KV_DENSE_F16;
        case KV_SOURCE_BF16: return KV_DENSE_BF16;
        case KV_SOURCE_Q2_K: return KV_Q2_K;
        case KV_SOURCE_Q3_K: return KV_Q3_K;
        case KV_SOURCE_Q4_K: return KV_Q4_K;
        case KV_SOURCE_Q5_K: return KV_Q5_K;
        case KV_SOURCE_Q6_K: return KV_Q6_K;
        case KV_SOURCE_IQ4_NL: return KV_IQ4_NL;
        case KV_SOURCE_IQ4_XS: return KV_IQ4_XS;
        case KV_SOURCE_MXFP4: return KV_MXFP4;
        default: return -1;
    }
}

int32_t kv_pack(int32_t source_format, const void* source, int32_t rows, int32_t columns, void* packed) {
    const int32_t format = kv_packed_format(source_format);
    if (kv_packed_bytes(format, rows, columns) < 0) return -1;
    const int blocks = columns / tile_shape(format).columns;
    switch (source_format) {
        case KV_SOURCE_Q4_0: pack_blocks<SourceQ4_0, TileQ4_0>(source, rows, blocks, packed); return 0;
        case KV_SOURCE_Q4_1: pack_blocks<SourceQ4_1, TileQ4<Half>>(source, rows, blocks, packed); return 0;
        case KV_SOURCE_Q5_0: pack_blocks<SourceQ5_0, TileQ5_0>(source, rows, blocks, packed); return 0;
        case KV_SOURCE_Q5_1: pack_blocks<SourceQ5_1, TileQ5_1>(source, rows, blocks, packed); return 0;
        case KV_SOURCE_Q8_0: pack_blocks<SourceQ8_0, TileQ8<Half>>(source, rows, blocks, packed); return 0;
        case KV_SOURCE_Q2_K: pack_blocks<SourceQ2K, TileQ2K>(source, rows, blocks, packed); return 0;
        case KV_SOURCE_Q3_K: pack_blocks<SourceQ3K, TileQ3K>(source, rows, blocks, packed); return 0;
        case KV_SOURCE_Q4_K: pack_blocks<SourceQ4K, TileQ4K>(source, rows, blocks, packed); return 0;
        case KV_SOURCE_Q5_K: pack_blocks<SourceQ5K, TileQ5K>(source, rows, blocks, packed); return 0;
        case KV_SOURCE_Q6_K: pack_blocks<SourceQ6K, TileQ6K>(source, rows, blocks, packed); return 0;
        case KV_SOURCE_IQ4_NL: pack_blocks<SourceQ4_0, TileIQ4NL>(source, rows, blocks, packed); return 0;
        case KV_SOURCE_IQ4_XS: pack_blocks<SourceIQ4XS, TileIQ4XS>(source, rows, blocks, packed); return 0;
        case KV_SOURCE_MXFP4: pack_blocks<SourceMXFP4, TileMXFP4>(source, rows, blocks, packed); return 0;
        case KV_SOURCE_F32: pack_dense<float>(source, rows, columns, packed); return 0;
        case KV_SOURCE_F16:
        case KV_SOURCE_BF16: pack_dense<uint16_t>(source, rows, columns, packed); return 0;
        default: return -1;
    }
}

int32_t kv_pack_codes(int32_t format, const uint8_t* codes, const float* scales, const float* minima, int32_t rows,
                      int32_t columns, void* packed) {
    const int64_t nbytes = kv_packed_bytes(format, rows, columns);
    if (nbytes < 0 || (format != KV_Q4_F32 && format != KV_Q8_F32 && format != KV_Q8_MIN_F32)) return -1;
    if ((format == KV_Q8_F32) != (minima == nullptr)) return -1;
    std::memset(packed, 0, nbytes);
    const int groups = columns / KV_GROUP, group_bytes = format == KV_Q4_F32 ? KV_GROUP / 2 : KV_GROUP;
    for (int row = 0; row < rows; row++)
        for (int g = 0; g < groups; g++) {
            const int r = row % KV_TILE;
            const int64_t at = int64_t(row) * groups + g, to = int64_t(row / KV_TILE) * groups + g;
            const uint8_t* from = codes + at * group_bytes;
            if (format == KV_Q4_F32) {
                TileQ4<float>& tile = ((TileQ4<float>*)packed)[to];
                uint8_t unpacked[KV_GROUP];
                for (int c = 0; c < KV_GROUP; c++) unpacked[c] = from[c / 2] >> 4 * (c % 2) & 15;
                tile.scale[r] = scales[at];
                tile.minimum[r] = minima[at];
                place_4_bits(tile.codes, r, unpacked);
            } else if (format == KV_Q8_F32) {
                TileQ8<float>& tile = ((TileQ8<float>*)packed)[to];
                tile.scale[r] = scales[at];
                place_byte_pairs(tile.bytes, r, (const int8_t*)from);
            } else {
                TileQ8Min& tile = ((TileQ8Min*)packed)[to];
                tile.scale[r] = scales[at];
                tile.minimum[r] = minima[at];
                place_byte_pairs(tile.bytes, r, (const int8_t*)from);
            }
        }
    return 0;
}

}  // extern "C"
