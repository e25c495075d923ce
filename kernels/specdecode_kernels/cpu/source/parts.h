// Division of work among the threads of one call, and the RMS norm, which several calls use.
#pragma once

#include <cmath>

#include "numbers.h"

struct Part {
    int64_t begin, end;
};

// Returns part `index` of `count` nearly equal parts of `total` items.
static inline Part part_of(int64_t total, int index, int count) {
    return {total * index / count, total * (index + 1) / count};
}

// Root mean square norm of one row; `weight` may be null.
static inline void rms_norm(const bf16* x, const bf16* weight, float eps, int64_t size, bf16* y) {
    __m512 squares = _mm512_setzero_ps();
    for (int64_t i = 0; i < size; i += 16) {
        const __m512 v = load16(x + i, lanes(size - i));
        squares = _mm512_fmadd_ps(v, v, squares);
    }
    const __m512 scale = _mm512_set1_ps(1.0f / std::sqrt(_mm512_reduce_add_ps(squares) / (float)size + eps));
    for (int64_t i = 0; i < size; i += 16) {
        const __mmask16 mask = lanes(size - i);
        __m512 v = _mm512_mul_ps(load16(x + i, mask), scale);
        if (weight) v = _mm512_mul_ps(v, load16(weight + i, mask));
        store16(y + i, v, mask);
    }
}
