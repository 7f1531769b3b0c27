// Division by a number that is constant within a launch, using a multiplication.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

struct Divisor {
    uint32_t by, inverse;

    struct Result {
        uint32_t quotient, remainder;
    };

    __device__ __forceinline__ explicit Divisor(uint32_t by) : by(by), inverse(0xffffffffu / by) {}

    // Divides a 31-bit number. The product is the quotient, or one less.
    __device__ __forceinline__ Result divide(uint32_t number) const {
        uint32_t quotient = __umulhi(number, inverse), remainder = number - quotient * by;
        if (remainder >= by) {
            quotient++;
            remainder -= by;
        }
        return {quotient, remainder};
    }

    // Whether a power of two is a multiple.
    __device__ __forceinline__ bool divides(uint32_t power_of_two) const { return (by & (by - 1)) == 0 && by <= power_of_two; }
};
