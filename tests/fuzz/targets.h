// What all fuzz targets share: numbers from bytes, and what is to hold whatever they are.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

/// Numbers from a string of bytes; zeros when it is used up.
class Bytes {
  public:
    Bytes(const uint8_t* data, size_t size) : data_(data), size_(size) {}

    uint64_t number() {
        uint64_t value = 0;
        const size_t taken = std::min(sizeof value, size_);
        if (taken > 0) std::memcpy(&value, data_, taken);
        data_ += taken;
        size_ -= taken;
        return value;
    }

    int64_t between(int64_t low, int64_t high) {
        return low + static_cast<int64_t>(number() % static_cast<uint64_t>(high - low + 1));
    }

    bool once_in(int64_t times) { return between(1, times) == 1; }

    /// Mostly near the small numbers that mean something, else anything.
    int64_t anything() {
        switch (between(0, 3)) {
            case 0:
                return static_cast<int64_t>(number());
            case 1:
                return (int64_t{1} << between(0, 62)) - between(0, 2);
            default:
                return between(-3, 60);
        }
    }

  private:
    const uint8_t* data_;
    size_t size_;
};

inline void check(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "broken: %s\n", what);
    std::abort();
}

// Each makes its arguments from the bytes, right ones and wrong ones, and ends with std::invalid_argument or
// std::out_of_range where they were refused.
void fuzz_pack(Bytes& bytes);
void fuzz_pool(Bytes& bytes);
void fuzz_permutation(Bytes& bytes);
void fuzz_numbers(Bytes& bytes);
void fuzz_bins(Bytes& bytes);
void fuzz_integer_set(Bytes& bytes);
void fuzz_state(Bytes& bytes);
void fuzz_gather(Bytes& bytes);
