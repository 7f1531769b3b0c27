// The products of cuBLAS that Candle calls, on the CPU. Sums are in f32, or in f64 for f64.

#include <stdint.h>
#include <stdio.h>

#include <vector>

#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "driver.h"

namespace {

// cublasStatus_t, cudaDataType_t and cublasComputeType_t
enum { SUCCESS = 0, INVALID_VALUE = 7 };
enum { R_32F = 0, R_64F = 1, R_16F = 2, R_16BF = 14 };
enum { COMPUTE_16F = 64, COMPUTE_16F_PEDANTIC = 65, COMPUTE_64F = 70, COMPUTE_64F_PEDANTIC = 71 };

struct Handle {
    void* stream = nullptr;
};

// A column-major matrix in device memory: element (i, j) is at i + j * stride.
struct Matrix {
    uint64_t start;
    int type;
    int64_t stride, step;  // step: elements from one matrix of the batch to the next
    bool is_transposed;

    int64_t element_bytes() const { return type == R_64F ? 8 : type == R_32F ? 4 : 2; }
    bool is_inside(int64_t rows, int64_t columns, int64_t index, const char* name) const {
        if (is_transposed) std::swap(rows, columns);
        const int64_t elements = (columns - 1) * stride + rows;
        return cuda_host::is_inside(address(index), (uint64_t)(elements * element_bytes()), name);
    }
    uint64_t address(int64_t index) const { return start + (uint64_t)(index * step * element_bytes()); }

    template <class S>
    S read(int64_t index, int64_t row, int64_t column) const {
        const int64_t at = is_transposed ? column + row * stride : row + column * stride;
        const void* from = (const void*)address(index);
        switch (type) {
        case R_64F: return (S)((const double*)from)[at];
        case R_32F: return (S)((const float*)from)[at];
        case R_16F: return (S)(float)((const __half*)from)[at];
        default: return (S)(float)((const __nv_bfloat16*)from)[at];
        }
    }
    void write(int64_t index, int64_t row, int64_t column, double x) const {
        const int64_t at = row + column * stride;
        void* to = (void*)address(index);
        switch (type) {
        case R_64F: ((double*)to)[at] = x; break;
        case R_32F: ((float*)to)[at] = (float)x; break;
        case R_16F: ((__half*)to)[at] = __half((float)x); break;
        default: ((__nv_bfloat16*)to)[at] = __nv_bfloat16((float)x);
        }
    }
};

struct Product {
    int64_t m, n, k, batch;
    double alpha, beta;
    Matrix a, b, c;

    template <class S>
    void run() const {
        std::vector<S> columns((size_t)(m * k)), sums((size_t)m);
        for (int64_t index = 0; index < batch; index++) {
            if (k > 0 && !(a.is_inside(m, k, index, "product: a") && b.is_inside(k, n, index, "product: b"))) return;
            if (!c.is_inside(m, n, index, "product: c")) return;
            for (int64_t l = 0; l < k; l++)
                for (int64_t i = 0; i < m; i++) columns[(size_t)(l * m + i)] = a.read<S>(index, i, l);
            for (int64_t j = 0; j < n; j++) {
                std::fill(sums.begin(), sums.end(), (S)0);
                for (int64_t l = 0; l < k; l++) {
                    const S factor = b.read<S>(index, l, j);
                    const S* column = &columns[(size_t)(l * m)];
                    for (int64_t i = 0; i < m; i++) sums[(size_t)i] += column[i] * factor;
                }
                // C is not read if beta is 0.
                for (int64_t i = 0; i < m; i++) {
                    const double old = beta == 0.0 ? 0.0 : beta * c.read<double>(index, i, j);
                    c.write(index, i, j, alpha * (double)sums[(size_t)i] + old);
                }
            }
        }
    }
};

int product(Handle* handle, const Product& product) {
    const auto [m, n, k, batch, alpha, beta, a, b, c] = product;
    const bool fits = m >= 0 && n >= 0 && k >= 0 && batch >= 0 && a.stride >= std::max<int64_t>(1, a.is_transposed ? k : m)
                      && b.stride >= std::max<int64_t>(1, b.is_transposed ? n : k) && c.stride >= std::max<int64_t>(1, m);
    if (!fits) {
        fprintf(stderr, "cuda_host: product of m %ld, n %ld, k %ld with strides %ld, %ld, %ld: invalid\n", (long)m, (long)n,
                (long)k, (long)a.stride, (long)b.stride, (long)c.stride);
        return INVALID_VALUE;
    }
    if (m == 0 || n == 0 || batch == 0) return SUCCESS;
    const std::vector<cuda_host::Use> uses = {{a.start, false}, {b.start, false}, {c.start, true}};
    cuda_host::enqueue(handle->stream, "product", uses, [=] {
        if (a.type == R_64F) product.run<double>();
        else product.run<float>();
    });
    return SUCCESS;
}

double scalar(const void* value, int compute) {
    switch (compute) {
    case COMPUTE_64F:
    case COMPUTE_64F_PEDANTIC: return *(const double*)value;
    case COMPUTE_16F:
    case COMPUTE_16F_PEDANTIC: return (float)*(const __half*)value;
    default: return *(const float*)value;
    }
}

}  // namespace

extern "C" {

int cublasCreate_v2(void** handle) {
    *handle = new Handle;
    return SUCCESS;
}
int cublasDestroy_v2(void* handle) {
    delete (Handle*)handle;
    return SUCCESS;
}
int cublasSetStream_v2(void* handle, void* stream) {
    ((Handle*)handle)->stream = stream;
    return SUCCESS;
}

int cublasGemmStridedBatchedEx(void* handle, int op_a, int op_b, int m, int n, int k, const void* alpha, const void* a, int type_a,
                               int stride_a, long long step_a, const void* b, int type_b, int stride_b, long long step_b,
                               const void* beta, void* c, int type_c, int stride_c, long long step_c, int batch, int compute,
                               int) {
    return product((Handle*)handle, {m, n, k, batch, scalar(alpha, compute), scalar(beta, compute),
                                     {(uint64_t)a, type_a, stride_a, step_a, op_a != 0},
                                     {(uint64_t)b, type_b, stride_b, step_b, op_b != 0},
                                     {(uint64_t)c, type_c, stride_c, step_c, false}});
}
int cublasGemmEx(void* handle, int op_a, int op_b, int m, int n, int k, const void* alpha, const void* a, int type_a, int stride_a,
                 const void* b, int type_b, int stride_b, const void* beta, void* c, int type_c, int stride_c, int compute,
                 int algorithm) {
    return cublasGemmStridedBatchedEx(handle, op_a, op_b, m, n, k, alpha, a, type_a, stride_a, 0, b, type_b, stride_b, 0, beta, c,
                                      type_c, stride_c, 0, 1, compute, algorithm);
}
int cublasDgemmStridedBatched(void* handle, int op_a, int op_b, int m, int n, int k, const double* alpha, const double* a,
                              int stride_a, long long step_a, const double* b, int stride_b, long long step_b,
                              const double* beta, double* c, int stride_c, long long step_c, int batch) {
    return cublasGemmStridedBatchedEx(handle, op_a, op_b, m, n, k, alpha, a, R_64F, stride_a, step_a, b, R_64F, stride_b, step_b,
                                      beta, c, R_64F, stride_c, step_c, batch, COMPUTE_64F, 0);
}

}  // extern "C"
