// The generator of cuRAND, on the CPU. Its numbers differ from those of a GPU.

#include <stddef.h>
#include <stdint.h>

#include <random>

#include "driver.h"

namespace {

struct Generator {
    void* stream = nullptr;
    std::mt19937_64 random;
};

template <class T, class Distribution>
int generate(void* handle, T* to, size_t count, Distribution distribution) {
    auto* generator = (Generator*)handle;
    cuda_host::enqueue(generator->stream, "random", {{(uint64_t)to, true}}, [=]() mutable {
        if (!cuda_host::is_inside((uint64_t)to, count * sizeof(T), "random numbers")) return;
        for (size_t i = 0; i < count; i++) to[i] = distribution(generator->random);
    });
    return 0;
}

}  // namespace

extern "C" {

int curandCreateGenerator(void** generator, int) {
    *generator = new Generator;
    return 0;
}
int curandDestroyGenerator(void* generator) {
    delete (Generator*)generator;
    return 0;
}
int curandSetStream(void* generator, void* stream) {
    ((Generator*)generator)->stream = stream;
    return 0;
}
int curandSetPseudoRandomGeneratorSeed(void* generator, unsigned long long seed) {
    ((Generator*)generator)->random.seed(seed);
    return 0;
}
int curandGenerateUniform(void* generator, float* to, size_t count) {
    return generate(generator, to, count, std::uniform_real_distribution<float>());
}
int curandGenerateUniformDouble(void* generator, double* to, size_t count) {
    return generate(generator, to, count, std::uniform_real_distribution<double>());
}
int curandGenerateNormal(void* generator, float* to, size_t count, float mean, float std) {
    return generate(generator, to, count, std::normal_distribution<float>(mean, std));
}
int curandGenerateNormalDouble(void* generator, double* to, size_t count, double mean, double std) {
    return generate(generator, to, count, std::normal_distribution<double>(mean, std));
}

}  // extern "C"
