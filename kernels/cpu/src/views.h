// One group of 32 columns of a packed tile, whatever its format: a view gives the group's
// codes and what they are multiplied with.
#pragma once

#include "dots.h"
#include "tiles.h"

namespace KV_ISA {

// Codes of a 4-bit plane, steps 0..7.
inline void load_nibbles(const uint8_t* plane, Codes (&out)[8]) {
    for (int i = 0; i < 4; i++) {
        const Codes bytes = load_codes(plane + 32 * i);
        out[i] = move_bits<0, 0, 4>(bytes);
        out[i + 4] = move_bits<4, 0, 4>(bytes);
    }
}
// Codes of a 2-bit plane, moved to bit TO.
template <int TO>
inline void load_two_bits(const uint8_t* plane, Codes (&out)[8]) {
    for (int i = 0; i < 2; i++) {
        const Codes bytes = load_codes(plane + 32 * i);
        out[i] = move_bits<0, TO, 2>(bytes);
        out[i + 2] = move_bits<2, TO, 2>(bytes);
        out[i + 4] = move_bits<4, TO, 2>(bytes);
        out[i + 6] = move_bits<6, TO, 2>(bytes);
    }
}
// Codes of a 1-bit plane, moved to bit TO and put on top of what is there.
template <int TO>
inline void add_bits(const uint8_t* plane, Codes (&out)[8]) {
    const Codes bytes = load_codes(plane);
    out[0] = out[0] | move_bits<0, TO, 1>(bytes);
    out[1] = out[1] | move_bits<1, TO, 1>(bytes);
    out[2] = out[2] | move_bits<2, TO, 1>(bytes);
    out[3] = out[3] | move_bits<3, TO, 1>(bytes);
    out[4] = out[4] | move_bits<4, TO, 1>(bytes);
    out[5] = out[5] | move_bits<5, TO, 1>(bytes);
    out[6] = out[6] | move_bits<6, TO, 1>(bytes);
    out[7] = out[7] | move_bits<7, TO, 1>(bytes);
}

// Views with CODES multiply unsigned codes of BITS bits: value = scale(h) * code + minimum(h) in half h of
// the group; HALVES says whether the halves differ.
enum class ViewKind { CODES, BYTES, DENSE };

template <class TileType, int groups, int bits, bool halves>
struct CodeView {
    using Tile = TileType;
    static constexpr int GROUPS = groups, BITS = bits;
    static constexpr bool HALVES = halves;
    static constexpr ViewKind KIND = ViewKind::CODES;
    const Tile& tile;
    const int g;
    CodeView(const Tile& from, int group) : tile(from), g(group) {}
};

struct Q4_1View : CodeView<TileQ4_1, 1, 4, false> {
    using CodeView::CodeView;
    void codes(Codes (&out)[8]) const { load_nibbles(tile.codes, out); }
    F8 scale(int) const { return F8::load(tile.scale); }
    F8 minimum(int, F8) const { return F8::load(tile.minimum); }
};
struct Q4_0View : CodeView<TileQ4_0, 1, 4, false> {
    using CodeView::CodeView;
    void codes(Codes (&out)[8]) const { load_nibbles(tile.codes, out); }
    F8 scale(int) const { return F8::load(tile.scale); }
    F8 minimum(int, F8 scale) const { return scale * F8::set1(-8.0f); }
};
struct Q5_0View : CodeView<TileQ5_0, 1, 5, false> {
    using CodeView::CodeView;
    void codes(Codes (&out)[8]) const {
        load_nibbles(tile.low, out);
        add_bits<4>(tile.high, out);
    }
    F8 scale(int) const { return F8::load(tile.scale); }
    F8 minimum(int, F8 scale) const { return scale * F8::set1(-16.0f); }
};
struct Q5_1View : CodeView<TileQ5_1, 1, 5, false> {
    using CodeView::CodeView;
    void codes(Codes (&out)[8]) const {
        load_nibbles(tile.low, out);
        add_bits<4>(tile.high, out);
    }
    F8 scale(int) const { return F8::load(tile.scale); }
    F8 minimum(int, F8) const { return F8::load(tile.minimum); }
};
struct MXFP4View : CodeView<TileMXFP4, 1, 5, false> {
    using CodeView::CodeView;
    void codes(Codes (&out)[8]) const {
        load_nibbles(tile.codes, out);
        for (Codes& step : out) step = look_up(step, MXFP4_VALUES);
    }
    F8 scale(int) const { return F8::load((const BFloat16*)tile.scale); }
    F8 minimum(int, F8 scale) const { return scale * F8::set1(-12.0f); }
};

// 4 bits of each of 8 bytes, from bit `shift` on.
inline F8 load_nibble(const uint8_t (&p)[KV_TILE], int shift) {
    uint64_t all;
    std::memcpy(&all, p, 8);
    all = all >> shift & 0x0f0f0f0f0f0f0f0full;
    return F8::load((const uint8_t*)&all);
}

struct Q2KView : CodeView<TileQ2K, BLOCK_GROUPS, 2, true> {
    using CodeView::CodeView;
    void codes(Codes (&out)[8]) const { load_two_bits<0>(tile.codes[g], out); }
    F8 scale(int half) const {
        return F8::load(tile.d) * load_nibble(tile.scales[2 * g + half], 0);
    }
    F8 minimum(int half, F8) const {
        return F8::zero() - F8::load(tile.dmin) * load_nibble(tile.scales[2 * g + half], 4);
    }
};
struct Q3KView : CodeView<TileQ3K, BLOCK_GROUPS, 3, true> {
    using CodeView::CodeView;
    void codes(Codes (&out)[8]) const {
        load_two_bits<0>(tile.groups[g].low, out);
        add_bits<2>(tile.groups[g].high, out);
    }
    F8 scale(int half) const { return F8::load(tile.d) * F8::load(tile.scales[2 * g + half]); }
    F8 minimum(int, F8 scale) const { return scale * F8::set1(-4.0f); }
};
struct Q4KView : CodeView<TileQ4K, BLOCK_GROUPS, 4, false> {
    using CodeView::CodeView;
    void codes(Codes (&out)[8]) const { load_nibbles(tile.codes[g], out); }
    F8 scale(int) const { return F8::load(tile.d) * F8::load(tile.scales[g]); }
    F8 minimum(int, F8) const { return F8::zero() - F8::load(tile.dmin) * F8::load(tile.minima[g]); }
};
struct Q5KView : CodeView<TileQ5K, BLOCK_GROUPS, 5, false> {
    using CodeView::CodeView;
    void codes(Codes (&out)[8]) const {
        load_nibbles(tile.groups[g].low, out);
        add_bits<4>(tile.groups[g].high, out);
    }
    F8 scale(int) const { return F8::load(tile.d) * F8::load(tile.scales[g]); }
    F8 minimum(int, F8) const { return F8::zero() - F8::load(tile.dmin) * F8::load(tile.minima[g]); }
};
struct Q6KView : CodeView<TileQ6K, BLOCK_GROUPS, 6, true> {
    using CodeView::CodeView;
    void codes(Codes (&out)[8]) const {
        Codes high[8];
        load_nibbles(tile.groups[g].low, out);
        load_two_bits<4>(tile.groups[g].high, high);
        for (int s = 0; s < 8; s++) out[s] = out[s] | high[s];
    }
    F8 scale(int half) const { return F8::load(tile.d) * F8::load(tile.scales[2 * g + half]); }
    F8 minimum(int, F8 scale) const { return scale * F8::set1(-32.0f); }
};

// Views of BYTES multiply signed bytes: value = scale * byte. `pairs` gives columns 2 s, 2 s + 1 and
// 16 + 2 s, 16 + 2 s + 1.
template <class TileType, int groups>
struct ByteView {
    using Tile = TileType;
    static constexpr int GROUPS = groups;
    static constexpr ViewKind KIND = ViewKind::BYTES;
    const Tile& tile;
    const int g;
    ByteView(const Tile& from, int group) : tile(from), g(group) {}
};

struct Q8_0View : ByteView<TileQ8_0, 1> {
    using ByteView::ByteView;
    void pairs(int s, BytePairs& first, BytePairs& second) const {
        first = load_byte_pairs(tile.bytes + 16 * s);
        second = load_byte_pairs(tile.bytes + 16 * (s + 8));
    }
    F8 scale() const { return F8::load(tile.scale); }
};
struct IQ4NLView : ByteView<TileIQ4NL, 1> {
    using ByteView::ByteView;
    void pairs(int s, BytePairs& first, BytePairs& second) const {
        look_up_pairs(tile.codes + 16 * s, IQ4_VALUES, first, second);
    }
    F8 scale() const { return F8::load(tile.scale); }
};
struct IQ4XSView : ByteView<TileIQ4XS, BLOCK_GROUPS> {
    using ByteView::ByteView;
    void pairs(int s, BytePairs& first, BytePairs& second) const {
        look_up_pairs(tile.codes[g] + 16 * s, IQ4_VALUES, first, second);
    }
    F8 scale() const { return F8::load(tile.d) * F8::load(tile.scales[g]); }
};

template <class Value>
struct DenseView {
    using Tile = TileDense<Value>;
    static constexpr int GROUPS = 1;
    static constexpr ViewKind KIND = ViewKind::DENSE;
    const Tile& tile;
    DenseView(const Tile& from, int) : tile(from) {}
    const Value* column(int c) const { return tile.values + KV_TILE * c; }
};

}  // namespace KV_ISA
