#include "pack.h"

#include <cstring>

#include "kvasir_cpu.h"

namespace {

// GGUF blocks of 32 columns. Q4: byte i holds column i low and column i + 16 high.
struct SourceQ4_0 {
    uint8_t scale[2];
    uint8_t bytes[16];
};
struct SourceQ4_1 {
    uint8_t scale[2];
    uint8_t minimum[2];
    uint8_t bytes[16];
};
struct SourceQ8_0 {
    uint8_t scale[2];
    int8_t bytes[32];
};

struct PackedQ4 {
    uint16_t scale[KV_TILE], minimum[KV_TILE];
    uint8_t bytes[128];
};
struct PackedQ8 {
    uint16_t scale[KV_TILE];
    int8_t bytes[256];
};

uint16_t read_half(const uint8_t* p) { return uint16_t(p[0] | p[1] << 8); }

// -8 times a half: exact unless it overflows, since only the exponent moves (subnormals shift).
uint16_t minus_eight_times(uint16_t h) {
    const uint16_t sign = uint16_t(~h & 0x8000u);
    uint32_t magnitude = h & 0x7fffu;
    if (magnitude == 0) return 0;
    if (magnitude >= 0x400u) return uint16_t(sign | (magnitude + (3u << 10)));
    magnitude <<= 3;  // a subnormal times 8; past 0x400 the carry is the right exponent only for one step
    if (magnitude < 0x800u) return uint16_t(sign | magnitude);
    uint32_t exponent = 1;
    while (magnitude >= 0x800u) {
        magnitude >>= 1;  // exact: at least three zero bits were shifted in
        exponent++;
    }
    return uint16_t(sign | exponent << 10 | (magnitude & 0x3ffu));
}

void place_nibbles(PackedQ4& to, int r, const uint8_t* bytes) {
    for (int s = 0; s < 4; s++) std::memcpy(to.bytes + 32 * s + 4 * r, bytes + 4 * s, 4);
}

template <class Source, class Packed, class Place>
void pack_blocks(const void* source, int32_t rows, int32_t columns, void* packed, Place place) {
    const int groups = columns / KV_GROUP, tiles = (rows + KV_TILE - 1) / KV_TILE;
    std::memset(packed, 0, sizeof(Packed) * int64_t(tiles) * groups);
    for (int row = 0; row < rows; row++) {
        const Source* from = (const Source*)source + int64_t(row) * groups;
        Packed* to = (Packed*)packed + int64_t(row / KV_TILE) * groups;
        for (int g = 0; g < groups; g++) place(from[g], to[g], row % KV_TILE);
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

int64_t packed_group_bytes(int32_t format) {
    switch (format) {
        case KV_Q4_F16: return 160;
        case KV_Q4_F32: return 192;
        case KV_Q8_F16: return 272;
        case KV_Q8_F32: return 288;
        case KV_DENSE_F32: return 1024;
        case KV_DENSE_F16:
        case KV_DENSE_BF16: return 512;
        default: return -1;
    }
}

extern "C" {

int64_t kv_packed_bytes(int32_t format, int32_t rows, int32_t columns) {
    const int64_t group = packed_group_bytes(format);
    if (group < 0 || rows <= 0 || columns <= 0 || columns % KV_GROUP) return -1;
    return group * ((rows + KV_TILE - 1) / KV_TILE) * (columns / KV_GROUP);
}

int32_t kv_packed_format(int32_t source_format) {
    switch (source_format) {
        case KV_SOURCE_Q4_0:
        case KV_SOURCE_Q4_1: return KV_Q4_F16;
        case KV_SOURCE_Q8_0: return KV_Q8_F16;
        case KV_SOURCE_F32: return KV_DENSE_F32;
        case KV_SOURCE_F16: return KV_DENSE_F16;
        case KV_SOURCE_BF16: return KV_DENSE_BF16;
        default: return -1;
    }
}

int32_t kv_pack(int32_t source_format, const void* source, int32_t rows, int32_t columns, void* packed) {
    if (kv_packed_bytes(kv_packed_format(source_format), rows, columns) < 0) return -1;
    switch (source_format) {
        case KV_SOURCE_Q4_0:
            pack_blocks<SourceQ4_0, PackedQ4>(source, rows, columns, packed,
                                              [](const SourceQ4_0& from, PackedQ4& to, int r) {
                                                  to.scale[r] = read_half(from.scale);
                                                  to.minimum[r] = minus_eight_times(to.scale[r]);
                                                  place_nibbles(to, r, from.bytes);
                                              });
            return 0;
        case KV_SOURCE_Q4_1:
            pack_blocks<SourceQ4_1, PackedQ4>(source, rows, columns, packed,
                                              [](const SourceQ4_1& from, PackedQ4& to, int r) {
                                                  to.scale[r] = read_half(from.scale);
                                                  to.minimum[r] = read_half(from.minimum);
                                                  place_nibbles(to, r, from.bytes);
                                              });
            return 0;
        case KV_SOURCE_Q8_0:
            pack_blocks<SourceQ8_0, PackedQ8>(source, rows, columns, packed,
                                              [](const SourceQ8_0& from, PackedQ8& to, int r) {
                                                  to.scale[r] = read_half(from.scale);
                                                  for (int c = 0; c < KV_GROUP; c++)
                                                      to.bytes[16 * (c / 2) + 2 * r + c % 2] = from.bytes[c];
                                              });
            return 0;
        case KV_SOURCE_F32: pack_dense<float>(source, rows, columns, packed); return 0;
        case KV_SOURCE_F16:
        case KV_SOURCE_BF16: pack_dense<uint16_t>(source, rows, columns, packed); return 0;
        default: return -1;
    }
}

}  // extern "C"
