// Brings weights from the layouts of model files into tiles.
#include <algorithm>
#include <cstring>
#include <vector>

#include "isa.h"
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
// Places `count` bytes in pairs: pair i of row r is pair 8 i + r.
template <int count>
void place_pairs(void* bytes, int r, const void* from) {
    for (int i = 0; i < count / 2; i++)
        std::memcpy((uint8_t*)bytes + 2 * (KV_TILE * i + r), (const uint8_t*)from + 2 * i, 2);
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
void place(const SourceQ4_1& from, TileQ4_1& to, int r) {
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
void place(const SourceQ8_0& from, TileQ8_0& to, int r) {
    to.scale[r] = read_half(from.scale);
    place_pairs<KV_GROUP>(to.bytes, r, from.bytes);
}
void place(const SourceMXFP4& from, TileMXFP4& to, int r) {
    // 2^(exponent - 128); the two smallest are subnormal.
    to.scale[r] = uint16_t(from.exponent < 2 ? 0x20 << from.exponent : (from.exponent - 1) << 7);
    place_nibbles(to.codes, r, from.codes);
}
void place(const SourceQ4_0& from, TileIQ4NL& to, int r) {  // IQ4_NL has the same fields
    to.scale[r] = read_half(from.scale);
    place_pairs<16>(to.codes, r, from.codes);
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
        place_pairs<16>(to.codes[g], r, from.codes + 16 * g);
    }
}

// Row `row` of the parts on top of each other.
const void* find_row(const KvPacking& matrix, int64_t row, int64_t row_bytes) {
    const KvRows* part = matrix.parts;
    for (; row >= part->num_rows; part++) row -= part->num_rows;
    return (const uint8_t*)part->rows + row * row_bytes;
}

int64_t num_rows(const KvPacking& matrix) {
    int64_t rows = 0;
    for (int64_t i = 0; i < matrix.num_parts; i++) rows += matrix.parts[i].num_rows;
    return rows;
}

// Packs tile number t, of which `rows` are there; the others become zero.
using PackTile = void (*)(const KvPacking& matrix, int64_t t, int rows);

template <int columns, class Source, class Tile>
void pack_blocks(const KvPacking& matrix, int64_t t, int rows) {
    const int blocks = matrix.columns / columns;
    Tile* tile = (Tile*)matrix.packed + t * blocks;
    if (rows < KV_TILE) std::memset(tile, 0, sizeof(Tile) * blocks);
    const Source* from[KV_TILE];
    for (int r = 0; r < rows; r++)
        from[r] = (const Source*)find_row(matrix, t * KV_TILE + r, int64_t(sizeof(Source)) * blocks);
    for (int b = 0; b < blocks; b++)
        for (int r = 0; r < rows; r++) place(from[r][b], tile[b], r);
}

template <class Value>
void pack_dense(const KvPacking& matrix, int64_t t, int rows) {
    Value* tile = (Value*)matrix.packed + t * KV_TILE * matrix.columns;
    if (rows < KV_TILE) std::memset(tile, 0, sizeof(Value) * KV_TILE * matrix.columns);
    for (int r = 0; r < rows; r++) {
        const Value* from = (const Value*)find_row(matrix, t * KV_TILE + r, int64_t(sizeof(Value)) * matrix.columns);
        for (int c = 0; c < matrix.columns; c++) tile[int64_t(c) * KV_TILE + r] = from[c];
    }
}

struct Format {
    TileShape tile;
    PackTile pack;
};

template <int columns, class Source, class Tile>
constexpr Format blocks_of() {
    return {{columns, sizeof(Tile)}, pack_blocks<columns, Source, Tile>};
}
template <class Value>
constexpr Format numbers_of() {
    return {{KV_GROUP, sizeof(TileDense<Value>)}, pack_dense<Value>};
}

const Format FORMATS[KV_NUM_FORMATS] = {
    numbers_of<float>(),
    numbers_of<uint16_t>(),
    numbers_of<uint16_t>(),
    blocks_of<KV_GROUP, SourceQ4_0, TileQ4_0>(),
    blocks_of<KV_GROUP, SourceQ4_1, TileQ4_1>(),
    blocks_of<KV_GROUP, SourceQ5_0, TileQ5_0>(),
    blocks_of<KV_GROUP, SourceQ5_1, TileQ5_1>(),
    blocks_of<KV_GROUP, SourceQ8_0, TileQ8_0>(),
    blocks_of<BLOCK, SourceQ2K, TileQ2K>(),
    blocks_of<BLOCK, SourceQ3K, TileQ3K>(),
    blocks_of<BLOCK, SourceQ4K, TileQ4K>(),
    blocks_of<BLOCK, SourceQ5K, TileQ5K>(),
    blocks_of<BLOCK, SourceQ6K, TileQ6K>(),
    blocks_of<KV_GROUP, SourceQ4_0, TileIQ4NL>(),
    blocks_of<BLOCK, SourceIQ4XS, TileIQ4XS>(),
    blocks_of<KV_GROUP, SourceMXFP4, TileMXFP4>(),
};

}  // namespace

TileShape tile_shape(int32_t format) {
    return format >= 0 && format < KV_NUM_FORMATS ? FORMATS[format].tile : TileShape{KV_GROUP, 0};
}

bool is_dense(int32_t format) { return format == KV_F32 || format == KV_F16 || format == KV_BF16; }

bool multiplies_bytes(int32_t format) {
    switch (format) {
        case KV_Q4_0:
        case KV_Q4_1:
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

int64_t kv_packed_bytes(int32_t format, int64_t rows, int32_t columns) {
    const TileShape tile = tile_shape(format);
    if (tile.bytes == 0 || rows <= 0 || rows > INT32_MAX - KV_TILE || columns <= 0 || columns % tile.columns) return -1;
    return int64_t(tile.bytes) * ((rows + KV_TILE - 1) / KV_TILE) * (columns / tile.columns);
}

int32_t kv_pack(const KvPacking* matrices, int32_t num_matrices) {
    // Tiles are handed out a run at a time, those of all matrices together: threads wait for each other once.
    constexpr int64_t RUN = 8;
    std::vector<int64_t> first_run(num_matrices + 1, 0);
    for (int32_t i = 0; i < num_matrices; i++) {
        const int64_t rows = num_rows(matrices[i]);
        if (kv_packed_bytes(matrices[i].format, rows, matrices[i].columns) < 0) return -1 - i;
        first_run[i + 1] = first_run[i] + (rows + RUN * KV_TILE - 1) / (RUN * KV_TILE);
    }
    if (first_run.back() > INT32_MAX / 2) return -1;
    WorkQueue queue;
    with_kernels(first_run.back() > 1, [&](const KernelTable&) {
        int32_t i = 0;
        for (int64_t run = queue.take(); run < first_run.back(); run = queue.take()) {
            while (run >= first_run[i + 1]) i++;
            const int64_t rows = num_rows(matrices[i]), first = (run - first_run[i]) * RUN;
            for (int64_t t = first; t < first + RUN && t * KV_TILE < rows; t++)
                FORMATS[matrices[i].format].pack(matrices[i], t, int(std::min<int64_t>(KV_TILE, rows - t * KV_TILE)));
        }
    });
    return 0;
}

}  // extern "C"
