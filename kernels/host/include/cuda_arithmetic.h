// The 16-bit floats. Arithmetic is in f32, and each result is rounded.
#pragma once

#include "cuda_host.h"

// Defines the type `name`, the pair `name2`, and their operators. `from` and `to` convert bits.
#define CUDA_HOST_HALF(name, from, to)                                                                                \
    struct name {                                                                                                     \
        uint16_t bits;                                                                                                \
        name() = default;                                                                                             \
        template <class T, class = std::enable_if_t<std::is_arithmetic<T>::value>>                                    \
        name(T x) : bits(to((float)x)) {}                                                                             \
        static name from_bits(uint16_t bits) {                                                                        \
            name x;                                                                                                   \
            x.bits = bits;                                                                                            \
            return x;                                                                                                 \
        }                                                                                                             \
        operator float() const { return from(bits); }                                                                 \
        name& operator+=(name o) { return *this = name((float)*this + (float)o); }                                    \
        name& operator-=(name o) { return *this = name((float)*this - (float)o); }                                    \
        name& operator*=(name o) { return *this = name((float)*this * (float)o); }                                    \
        name& operator/=(name o) { return *this = name((float)*this / (float)o); }                                    \
    };                                                                                                                \
    static inline name operator+(name a, name b) { return name((float)a + (float)b); }                                \
    static inline name operator-(name a, name b) { return name((float)a - (float)b); }                                \
    static inline name operator*(name a, name b) { return name((float)a * (float)b); }                                \
    static inline name operator/(name a, name b) { return name((float)a / (float)b); }                                \
    static inline name operator-(name a) { return name(-(float)a); }                                                  \
    static inline bool operator==(name a, name b) { return (float)a == (float)b; }                                    \
    static inline bool operator!=(name a, name b) { return (float)a != (float)b; }                                    \
    static inline bool operator<(name a, name b) { return (float)a < (float)b; }                                      \
    static inline bool operator<=(name a, name b) { return (float)a <= (float)b; }                                    \
    static inline bool operator>(name a, name b) { return (float)a > (float)b; }                                      \
    static inline bool operator>=(name a, name b) { return (float)a >= (float)b; }                                    \
    struct alignas(4) name##2 { name x, y; };                                                                         \
    static inline name##2 __hadd2(name##2 a, name##2 b) { return {a.x + b.x, a.y + b.y}; }                            \
    static inline name##2 __hmul2(name##2 a, name##2 b) { return {a.x * b.x, a.y * b.y}; }                            \
    static inline bool __hisnan(name a) { return isnan((float)a); }                                                   \
    static inline name __habs(name a) { return name::from_bits(a.bits & 0x7fff); }                                    \
    static inline name hsqrt(name a) { return name(sqrtf(a)); }                                                       \
    static inline name hcos(name a) { return name(cosf(a)); }                                                         \
    static inline name hsin(name a) { return name(sinf(a)); }                                                         \
    static inline name hlog(name a) { return name(logf(a)); }                                                         \
    static inline name hexp(name a) { return name(expf(a)); }                                                         \
    static inline name __hmax_nan(name a, name b) { return __hisnan(a) ? a : __hisnan(b) ? b : a > b ? a : b; }       \
    static inline name __hmin_nan(name a, name b) { return __hisnan(a) ? a : __hisnan(b) ? b : a < b ? a : b; }
