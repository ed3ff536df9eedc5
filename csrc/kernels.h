// Loops over the elements of one row, one function per pair of types and instruction set. Internal to
// gather.cpp.
#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>
#include <type_traits>
#include <vector>

#include "gather.h"

#if defined(__GNUC__) && defined(__x86_64__)
#define MULTIPACK_X86 1
#endif
#if defined(__GNUC__)
#define MULTIPACK_INLINE [[gnu::always_inline]] inline
#else
#define MULTIPACK_INLINE inline
#endif

namespace multipack {

struct Float16 {
    uint16_t bits;
};

/// Arrow buffers may lie at any address, so elements are loaded as bytes; compilers make plain loads of it.
template <class T>
MULTIPACK_INLINE T load(const std::byte* values, int64_t index) {
    T value;
    std::memcpy(&value, values + index * static_cast<int64_t>(sizeof(T)), sizeof(T));
    return value;
}

/// Half to single precision, exact for all values, without branches so that it vectorises.
MULTIPACK_INLINE float widen(Float16 half) {
    const uint32_t sign = static_cast<uint32_t>(half.bits & 0x8000u) << 16;
    const uint32_t rest = half.bits & 0x7fffu;
    const uint32_t exponent = rest >= 0x7c00u ? (255u - 31u) << 23 : (127u - 15u) << 23;
    const float normal = std::bit_cast<float>((rest << 13) + exponent);
    // A subnormal is rest * 2^-24, and 2^-24 is the last bit of 0.5: put it there and take 0.5 away again.
    const float subnormal = std::bit_cast<float>(rest | (126u << 23)) - 0.5f;
    return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(rest < 0x0400u ? subnormal : normal));
}

template <class Out, class In>
MULTIPACK_INLINE Out to(In value) {
    if constexpr (std::is_same_v<In, Float16>) {
        return to<Out>(widen(value));
    } else if constexpr (std::is_same_v<Out, bool>) {
        return value != In{0};
    } else {
        return static_cast<Out>(value);
    }
}

template <class In, class Out>
MULTIPACK_INLINE void convert_loop(const std::byte* in, int64_t count, Out* out) {
    for (int64_t i = 0; i < count; ++i) out[i] = to<Out>(load<In>(in, i));
}

/// Labels are the elements where `keep` is nonzero (everywhere if there is none), else `ignore`. Returns how
/// many are not `ignore`; counting while writing spares reading the labels back, which would wait for their
/// memory.
template <class In, class Out>
MULTIPACK_INLINE int64_t label_loop(const std::byte* in, const std::byte* keep, int64_t count, Out ignore,
                                    Out* out) {
    int64_t targets = 0;
    if (keep == nullptr) {
        for (int64_t i = 0; i < count; ++i) {
            const Out label = to<Out>(load<In>(in, i));
            out[i] = label;
            targets += label != ignore;
        }
    } else {
        for (int64_t i = 0; i < count; ++i) {
            const Out label = keep[i] != std::byte{0} ? to<Out>(load<In>(in, i)) : ignore;
            out[i] = label;
            targets += label != ignore;
        }
    }
    return targets;
}

/// Eight bits from bit `first` on as eight bytes of 0 or 1, in the order of little-endian Arrow.
MULTIPACK_INLINE uint64_t unpack_8_bits(const std::byte* bits, int64_t first) {
    const auto low = static_cast<uint32_t>(bits[first >> 3]),
               high = static_cast<uint32_t>(bits[(first + 7) >> 3]);
    const uint64_t byte = ((low | high << 8) >> (first & 7)) & 0xff;
    // Byte i of the product keeps bit i only; the addition moves it to the top of its byte.
    return ((byte * 0x0101010101010101 & 0x8040201008040201) + 0x7f7f7f7f7f7f7f7f) >> 7 & 0x0101010101010101;
}

static_assert(std::endian::native == std::endian::little, "unpack_bits copies eight bytes in this order");

MULTIPACK_INLINE void unpack_bits(const std::byte* bits, int64_t first, int64_t count, std::byte* out) {
    int64_t i = 0;
    for (; i + 8 <= count; i += 8) {
        const uint64_t bytes = unpack_8_bits(bits, first + i);
        std::memcpy(out + i, &bytes, 8);
    }
    for (; i < count; ++i) out[i] = bits[(first + i) >> 3] >> ((first + i) & 7) & std::byte{1};
}

MULTIPACK_INLINE void positions_loop(int64_t first, int64_t count, int64_t* out) {
    for (int64_t i = 0; i < count; ++i) out[i] = first + i;
}

using Convert = void (*)(const std::byte* in, int64_t count, void* out);
using Label = int64_t (*)(const std::byte* in, const std::byte* keep, int64_t count, int64_t ignore,
                          void* out);

constexpr int kNumElements = 12;
constexpr int kNumOutputs = 3;

/// Tables in the order of Element and Output; nullptr where there is no way: floats do not become integers,
/// labels are never boolean.
struct Kernels {
    std::string_view name;
    std::array<std::array<Convert, kNumOutputs>, kNumElements> convert;
    std::array<std::array<Label, kNumOutputs>, kNumElements> label;
    void (*positions)(int64_t first, int64_t count, int64_t* out);
};

// The loops are inlined here, so that the compiler vectorises each for the set named in ATTRIBUTE. AVX-512
// was measured and gains nothing over AVX2: the loops wait for memory.
#define MULTIPACK_KERNELS(SET, ATTRIBUTE)                                                                  \
    struct SET {                                                                                           \
        template <class In, class Out>                                                                     \
        ATTRIBUTE static void convert(const std::byte* in, int64_t count, void* out) {                     \
            convert_loop<In, Out>(in, count, static_cast<Out*>(out));                                      \
        }                                                                                                  \
        template <class In, class Out>                                                                     \
        ATTRIBUTE static int64_t label(const std::byte* in, const std::byte* keep, int64_t count,          \
                                       int64_t ignore, void* out) {                                        \
            return label_loop<In, Out>(in, keep, count, static_cast<Out>(ignore), static_cast<Out*>(out)); \
        }                                                                                                  \
        ATTRIBUTE static void positions(int64_t first, int64_t count, int64_t* out) {                      \
            positions_loop(first, count, out);                                                             \
        }                                                                                                  \
    };

MULTIPACK_KERNELS(Baseline, )
#ifdef MULTIPACK_X86
MULTIPACK_KERNELS(Avx2, __attribute__((target("avx2"))))
#endif

template <class Set>
Kernels kernels_of(std::string_view name) {
    Kernels kernels{name, {}, {}, &Set::positions};
    const auto add = [&kernels]<class In>(Element element, std::type_identity<In>) {
        auto& convert = kernels.convert[static_cast<int>(element)];
        auto& label = kernels.label[static_cast<int>(element)];
        convert[static_cast<int>(Output::boolean)] = &Set::template convert<In, bool>;
        convert[static_cast<int>(Output::float32)] = &Set::template convert<In, float>;
        label[static_cast<int>(Output::float32)] = &Set::template label<In, float>;
        if constexpr (std::is_integral_v<In>) {
            convert[static_cast<int>(Output::int64)] = &Set::template convert<In, int64_t>;
            label[static_cast<int>(Output::int64)] = &Set::template label<In, int64_t>;
        }
    };
    add(Element::bit, std::type_identity<uint8_t>{});  // unpacked to bytes before
    add(Element::int8, std::type_identity<int8_t>{});
    add(Element::int16, std::type_identity<int16_t>{});
    add(Element::int32, std::type_identity<int32_t>{});
    add(Element::int64, std::type_identity<int64_t>{});
    add(Element::uint8, std::type_identity<uint8_t>{});
    add(Element::uint16, std::type_identity<uint16_t>{});
    add(Element::uint32, std::type_identity<uint32_t>{});
    add(Element::uint64, std::type_identity<uint64_t>{});
    add(Element::float16, std::type_identity<Float16>{});
    add(Element::float32, std::type_identity<float>{});
    add(Element::float64, std::type_identity<double>{});
    return kernels;
}

/// What this machine can run, widest last.
inline const std::vector<Kernels>& available_kernels() {
    static const std::vector<Kernels> available = [] {
        std::vector<Kernels> kernels{kernels_of<Baseline>("baseline")};
#ifdef MULTIPACK_X86
        __builtin_cpu_init();
        if (__builtin_cpu_supports("avx2")) kernels.push_back(kernels_of<Avx2>("avx2"));
#endif
        return kernels;
    }();
    return available;
}

inline std::atomic<const Kernels*> kernels_in_use{&available_kernels().back()};

}  // namespace multipack
