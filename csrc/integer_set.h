// A set of whole numbers that finds a member's neighbours in a few steps, however sparse it is.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <vector>

namespace multipack {

/// A bitmap below a tree of summaries: bit w of a level says whether word w of the level below holds any bit.
/// A plain bitmap of 2^24 lengths would be read for its empty words alone.
class IntegerSet {
  public:
    explicit IntegerSet(int32_t largest) {
        size_t size = static_cast<size_t>(largest) + 1, total = 0;
        do {
            size = (size + 63) / 64;
            starts_[num_levels_++] = total;
            total += size;
        } while (size > 1 || num_levels_ < 2);
        starts_[num_levels_] = total;
        words_.resize(total);
    }

    void insert(int32_t i) {
        const uint64_t before = words_[i >> 6];
        words_[i >> 6] = before | 1ULL << (i & 63);
        if (before == 0) insert_above(i >> 6);
    }

    /// Insert from..to-1.
    void insert_range(int32_t from, int32_t to) {
        for (int32_t w = from >> 6; w << 6 < to; ++w) {
            const int32_t skipped = std::max(from - (w << 6), 0), used = std::min(to - (w << 6), 64);
            const uint64_t before = words_[w];
            words_[w] = before | (~0ULL >> (64 - used + skipped) << skipped);
            if (before == 0) insert_above(w);
        }
    }

    void erase(int32_t i) { erase_if(i, true); }

    /// Erase member `i` if `really`, which is free to be unpredictable: it is no branch.
    void erase_if(int32_t i, bool really) {
        const uint64_t after = words_[i >> 6] & ~(uint64_t{really} << (i & 63));
        words_[i >> 6] = after;
        if (after == 0) erase_above(i >> 6);
    }

    void clear() { std::fill(words_.begin(), words_.end(), 0); }

    /// The smallest member from `i` on, or -1.
    int32_t successor(int32_t i) const { return successor_in(0, i); }

    /// The largest member up to `i`, or -1.
    int32_t predecessor(int32_t i) const {
        for (int up = 0; up < num_levels_ && i >= 0; ++up) {
            const uint64_t bits = at(up, i >> 6) << (63 - (i & 63));
            if (bits) {
                i -= std::countl_zero(bits);
                while (up-- > 0) i = (i << 6) + 63 - std::countl_zero(at(up, i));
                return i;
            }
            i = (i >> 6) - 1;
        }
        return -1;
    }

    /// Members 64 w .. 64 w + 63 as bits.
    uint64_t word(int32_t w) const { return words_[w]; }

    /// Change bits of a word for a moment: summaries stay, so until the same call undoes it only word() and
    /// find_word() may be used, and find only members that are left.
    void flip(int32_t w, uint64_t bits) { words_[w] ^= bits; }

    /// Call `visit` with the members in rising order until it returns false. It may erase the member it is
    /// called with and those before it.
    template <class Visit>
    void visit(Visit visit) const {
        for (int32_t w = successor_in(1, 0); w >= 0; w = successor_in(1, w + 1))
            for (uint64_t bits = words_[w]; bits != 0; bits &= bits - 1)
                if (!visit((w << 6) + std::countr_zero(bits))) return;
    }

    /// The first word from `w` on that holds a member, or -1.
    int32_t next_word(int32_t w) const { return successor_in(1, w); }

    /// The first word from `from` up to `to` (not included) with a member for which `found` is true, or -1.
    template <class Found>
    int32_t find_word(int32_t from, int32_t to, Found found) const {
        for (int32_t block = from >> 6; 0 <= block && block << 6 < to; block = successor_in(2, block + 1)) {
            uint64_t used = at(1, block);
            if (block == from >> 6) used &= ~0ULL << (from & 63);
            for (; used != 0; used &= used - 1) {
                const int32_t w = (block << 6) + std::countr_zero(used);
                if (w >= to) return -1;
                if (found(w)) return w;
            }
        }
        return -1;
    }

  private:
    uint64_t& at(int level, int32_t w) { return words_[starts_[level] + static_cast<size_t>(w)]; }
    uint64_t at(int level, int32_t w) const { return words_[starts_[level] + static_cast<size_t>(w)]; }

    void insert_above(int32_t i) {
        for (int level = 1; level < num_levels_; ++level) {
            uint64_t& word = at(level, i >> 6);
            const bool known_above = word != 0;
            word |= 1ULL << (i & 63);
            if (known_above) return;
            i >>= 6;
        }
    }

    void erase_above(int32_t i) {
        for (int level = 1; level < num_levels_; ++level) {
            if (at(level, i >> 6) &= ~(1ULL << (i & 63))) return;
            i >>= 6;
        }
    }

    int32_t successor_in(int level, int32_t i) const {
        for (int up = level; up < num_levels_; ++up) {
            if (static_cast<size_t>(i >> 6) >= starts_[up + 1] - starts_[up]) return -1;
            const uint64_t bits = at(up, i >> 6) >> (i & 63);
            if (bits) {
                i += std::countr_zero(bits);
                while (up-- > level) i = (i << 6) + std::countr_zero(at(up, i));
                return i;
            }
            i = (i >> 6) + 1;
        }
        return -1;
    }

    std::vector<uint64_t> words_;  // all levels, the members first
    std::array<size_t, 8> starts_{};
    int num_levels_ = 0;
};

}  // namespace multipack
