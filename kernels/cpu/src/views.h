// One group of 32 columns of a packed tile, whatever its format: a view gives the group's
// codes and what they are multiplied with.
#pragma once

#include "dots.h"
#include "tiles.h"

namespace KV_ISA {

// Step S of a plane of codes (tiles.h), moved to bit TO.
template <int S>
inline Codes nibbles(const uint8_t* plane) {
    return move_bits<S / 4 * 4, 0, 4>(load_codes(plane + 32 * (S % 4)));
}
template <int S, int TO>
inline Codes two_bits(const uint8_t* plane) {
    return move_bits<S / 2 * 2, TO, 2>(load_codes(plane + 32 * (S % 2)));
}
template <int S, int TO>
inline Codes one_bit(const uint8_t* plane) {
    return move_bits<S, TO, 1>(load_codes(plane));
}

// Views with CODES multiply unsigned codes of BITS bits, step S = 0..7 of 4 columns each: value = scale(h) * code +
// minimum(h) in half h of the group; HALVES says whether the halves differ.
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
    template <int S>
    Codes step() const {
        return nibbles<S>(tile.codes);
    }
    F8 scale(int) const { return F8::load(tile.scale); }
    F8 minimum(int, F8) const { return F8::load(tile.minimum); }
};
struct Q4_0View : CodeView<TileQ4_0, 1, 4, false> {
    using CodeView::CodeView;
    template <int S>
    Codes step() const {
        return nibbles<S>(tile.codes);
    }
    F8 scale(int) const { return F8::load(tile.scale); }
    F8 minimum(int, F8 scale) const { return scale * F8::set1(-8.0f); }
};
struct Q5_0View : CodeView<TileQ5_0, 1, 5, false> {
    using CodeView::CodeView;
    template <int S>
    Codes step() const {
        return nibbles<S>(tile.low) | one_bit<S, 4>(tile.high);
    }
    F8 scale(int) const { return F8::load(tile.scale); }
    F8 minimum(int, F8 scale) const { return scale * F8::set1(-16.0f); }
};
struct Q5_1View : CodeView<TileQ5_1, 1, 5, false> {
    using CodeView::CodeView;
    template <int S>
    Codes step() const {
        return nibbles<S>(tile.low) | one_bit<S, 4>(tile.high);
    }
    F8 scale(int) const { return F8::load(tile.scale); }
    F8 minimum(int, F8) const { return F8::load(tile.minimum); }
};
struct MXFP4View : CodeView<TileMXFP4, 1, 5, false> {
    using CodeView::CodeView;
    template <int S>
    Codes step() const {
        return look_up(nibbles<S>(tile.codes), MXFP4_VALUES);
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
    template <int S>
    Codes step() const {
        return two_bits<S, 0>(tile.codes[g]);
    }
    F8 scale(int half) const {
        return F8::load(tile.d) * load_nibble(tile.scales[2 * g + half], 0);
    }
    F8 minimum(int half, F8) const {
        return F8::zero() - F8::load(tile.dmin) * load_nibble(tile.scales[2 * g + half], 4);
    }
};
struct Q3KView : CodeView<TileQ3K, BLOCK_GROUPS, 3, true> {
    using CodeView::CodeView;
    template <int S>
    Codes step() const {
        return two_bits<S, 0>(tile.groups[g].low) | one_bit<S, 2>(tile.groups[g].high);
    }
    F8 scale(int half) const { return F8::load(tile.d) * F8::load(tile.scales[2 * g + half]); }
    F8 minimum(int, F8 scale) const { return scale * F8::set1(-4.0f); }
};
struct Q4KView : CodeView<TileQ4K, BLOCK_GROUPS, 4, false> {
    using CodeView::CodeView;
    template <int S>
    Codes step() const {
        return nibbles<S>(tile.codes[g]);
    }
    F8 scale(int) const { return F8::load(tile.d) * F8::load(tile.scales[g]); }
    F8 minimum(int, F8) const { return F8::zero() - F8::load(tile.dmin) * F8::load(tile.minima[g]); }
};
struct Q5KView : CodeView<TileQ5K, BLOCK_GROUPS, 5, false> {
    using CodeView::CodeView;
    template <int S>
    Codes step() const {
        return nibbles<S>(tile.groups[g].low) | one_bit<S, 4>(tile.groups[g].high);
    }
    F8 scale(int) const { return F8::load(tile.d) * F8::load(tile.scales[g]); }
    F8 minimum(int, F8) const { return F8::zero() - F8::load(tile.dmin) * F8::load(tile.minima[g]); }
};
struct Q6KView : CodeView<TileQ6K, BLOCK_GROUPS, 6, true> {
    using CodeView::CodeView;
    template <int S>
    Codes step() const {
        return nibbles<S>(tile.groups[g].low) | two_bits<S, 4>(tile.groups[g].high);
    }
    F8 scale(int half) const { return F8::load(tile.d) * F8::load(tile.scales[2 * g + half]); }
    F8 minimum(int, F8 scale) const { return scale * F8::set1(-32.0f); }
};

// Views of BYTES multiply signed bytes: value = scale * byte; step S = 0..15 holds 2 columns.
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
    template <int S>
    BytePairs step() const {
        return load_byte_pairs(tile.bytes + 16 * S);
    }
    F8 scale() const { return F8::load(tile.scale); }
};
struct IQ4NLView : ByteView<TileIQ4NL, 1> {
    using ByteView::ByteView;
    template <int S>
    BytePairs step() const {
        return look_up_pairs<S / 8 * 4>(tile.codes + 16 * (S % 8), IQ4_VALUES);
    }
    F8 scale() const { return F8::load(tile.scale); }
};
struct IQ4XSView : ByteView<TileIQ4XS, BLOCK_GROUPS> {
    using ByteView::ByteView;
    template <int S>
    BytePairs step() const {
        return look_up_pairs<S / 8 * 4>(tile.codes[g] + 16 * (S % 8), IQ4_VALUES);
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
