// Formats of GGUF blocks. They are defined in ggml (ggml-common.h), and described in
// src/cpu/blocks.rs.
//
// A format has BYTES bytes for SIZE values. Each GROUP of values has a factor and an offset, which
// `scale(block, i)` returns for value i. A value is factor * (number - LESS) + offset, and
// `numbers(block, i)` has those from i on, a multiple of 4, in the bytes of a word. Blocks start at
// even addresses. Products are exact in f32, so a result is rounded once, contracted or not.
#pragma once

#include "element.cuh"

__device__ __forceinline__ float half_at(const uint8_t *block, int place) {
    return to_float(*reinterpret_cast<const __half *>(block + place));
}

// Four bytes at an even place.
__device__ __forceinline__ uint32_t word_at(const uint8_t *block, uint32_t place) {
    const uint16_t *halves = reinterpret_cast<const uint16_t *>(block + place);
    return (uint32_t)halves[0] | (uint32_t)halves[1] << 16;
}

// The factor, without an offset: -0 changes no number, not even -0.
__device__ __forceinline__ float2 only_factor(float factor) { return make_float2(factor, -0.0f); }

// The low or high nibbles in 16 bytes, for the values from i on in a block of 32.
__device__ __forceinline__ uint32_t nibbles(const uint8_t *bytes, uint32_t i) {
    return word_at(bytes, i % 16) >> (i / 16 * 4) & 0x0f0f0f0fu;
}

// Bits i to i + 3 of the four bytes, each as the fifth bit of a byte.
__device__ __forceinline__ uint32_t fifth_bits(const uint8_t *bytes, uint32_t i) {
    return ((word_at(bytes, 0) >> i & 15) * 0x00204081u & 0x01010101u) << 4;
}

struct Q4_0 {
    static constexpr uint32_t BYTES = 18, SIZE = 32, GROUP = 32, LESS = 8;
    static __device__ __forceinline__ float2 scale(const uint8_t *block, uint32_t) {
        return only_factor(half_at(block, 0));
    }
    static __device__ __forceinline__ uint32_t numbers(const uint8_t *block, uint32_t i) {
        return nibbles(block + 2, i);
    }
};

struct Q4_1 {
    static constexpr uint32_t BYTES = 20, SIZE = 32, GROUP = 32, LESS = 0;
    static __device__ __forceinline__ float2 scale(const uint8_t *block, uint32_t) {
        return make_float2(half_at(block, 0), half_at(block, 2));
    }
    static __device__ __forceinline__ uint32_t numbers(const uint8_t *block, uint32_t i) {
        return nibbles(block + 4, i);
    }
};

struct Q5_0 {
    static constexpr uint32_t BYTES = 22, SIZE = 32, GROUP = 32, LESS = 16;
    static __device__ __forceinline__ float2 scale(const uint8_t *block, uint32_t) {
        return only_factor(half_at(block, 0));
    }
    static __device__ __forceinline__ uint32_t numbers(const uint8_t *block, uint32_t i) {
        return nibbles(block + 6, i) | fifth_bits(block + 2, i);
    }
};

struct Q5_1 {
    static constexpr uint32_t BYTES = 24, SIZE = 32, GROUP = 32, LESS = 0;
    static __device__ __forceinline__ float2 scale(const uint8_t *block, uint32_t) {
        return make_float2(half_at(block, 0), half_at(block, 2));
    }
    static __device__ __forceinline__ uint32_t numbers(const uint8_t *block, uint32_t i) {
        return nibbles(block + 8, i) | fifth_bits(block + 4, i);
    }
};

struct Q8_0 {
    static constexpr uint32_t BYTES = 34, SIZE = 32, GROUP = 32, LESS = 128;
    static __device__ __forceinline__ float2 scale(const uint8_t *block, uint32_t) {
        return only_factor(half_at(block, 0));
    }
    static __device__ __forceinline__ uint32_t numbers(const uint8_t *block, uint32_t i) {
        return word_at(block, 2 + i) ^ 0x80808080u;
    }
};

// The factor and offset of part `part` of 8 in a Q4_K or Q5_K block, 6 bits each. The first four
// parts have six bits of the bytes `low` and `middle`. The others have a half of `high`, and the
// two bits that are left.
__device__ __forceinline__ float2 scale_of_part(const uint8_t *block, uint32_t part) {
    const uint8_t *bytes = block + 4 + part % 4;
    const int low = bytes[0], middle = bytes[4], high = bytes[8];
    const int scale = part < 4 ? low & 63 : (high & 15) | (low >> 6 << 4);
    const int min = part < 4 ? middle & 63 : high >> 4 | (middle >> 6 << 4);
    return make_float2(half_at(block, 0) * (float)scale, -(half_at(block, 2) * (float)min));
}

// The low or high nibbles in 128 bytes, for the values from i on in a block of 256.
__device__ __forceinline__ uint32_t nibbles_of_part(const uint8_t *bytes, uint32_t i) {
    return word_at(bytes, i / 64 * 32 + i % 32) >> (i / 32 % 2 * 4) & 0x0f0f0f0fu;
}

struct Q4_K {
    static constexpr uint32_t BYTES = 144, SIZE = 256, GROUP = 32, LESS = 0;
    static __device__ __forceinline__ float2 scale(const uint8_t *block, uint32_t i) {
        return scale_of_part(block, i / 32);
    }
    static __device__ __forceinline__ uint32_t numbers(const uint8_t *block, uint32_t i) {
        return nibbles_of_part(block + 16, i);
    }
};

struct Q5_K {
    static constexpr uint32_t BYTES = 176, SIZE = 256, GROUP = 32, LESS = 0;
    static __device__ __forceinline__ float2 scale(const uint8_t *block, uint32_t i) {
        return scale_of_part(block, i / 32);
    }
    static __device__ __forceinline__ uint32_t numbers(const uint8_t *block, uint32_t i) {
        return nibbles_of_part(block + 48, i) | (word_at(block, 16 + i % 32) >> (i / 32) & 0x01010101u) << 4;
    }
};

struct Q6_K {
    static constexpr uint32_t BYTES = 210, SIZE = 256, GROUP = 16, LESS = 32;
    static __device__ __forceinline__ float2 scale(const uint8_t *block, uint32_t i) {
        return only_factor(half_at(block, 208) * (float)(int8_t)block[192 + i / 16]);
    }
    static __device__ __forceinline__ uint32_t numbers(const uint8_t *block, uint32_t i) {
        const uint32_t half = i / 128, quarter = i / 32 % 4, column = i % 32;
        const uint32_t low = word_at(block, 64 * half + 32 * (quarter % 2) + column) >> (quarter / 2 * 4) & 0x0f0f0f0fu;
        return low | (word_at(block, 128 + 32 * half + column) >> (2 * quarter) & 0x03030303u) << 4;
    }
};

// Returns four values of a format from their numbers and scale. As the mantissa of 2^23, a byte is
// a number without a conversion.
template <typename Format> __device__ __forceinline__ float4 to_values(uint32_t numbers, float2 scale) {
    const auto value = [&](uint32_t i) {
        const float sum = __uint_as_float(__byte_perm(numbers, 0x4b000000u, 0x7440u + i));
        return (sum - (float)(0x800000 + Format::LESS)) * scale.x + scale.y;
    };
    return make_float4(value(0), value(1), value(2), value(3));
}

// Calls `of` with the format whose blocks have this number of bytes. All numbers are different.
template <typename Of> __device__ __forceinline__ void with_format(uint32_t bytes, Of of) {
    switch (bytes) {
        case Q4_0::BYTES: return of(Q4_0());
        case Q4_1::BYTES: return of(Q4_1());
        case Q5_0::BYTES: return of(Q5_0());
        case Q5_1::BYTES: return of(Q5_1());
        case Q8_0::BYTES: return of(Q8_0());
        case Q4_K::BYTES: return of(Q4_K());
        case Q5_K::BYTES: return of(Q5_K());
        case Q6_K::BYTES: return of(Q6_K());
    }
}
