// y = x W^T over a matrix in panels of 32 outputs, with pairs of inputs innermost, the layout that dpbf16 needs.
//
// Every output is one chain of dpbf16 over the inputs in order, for any number of rows and any number of threads that
// share the panels. The result of a row therefore does not depend on the other rows.
#pragma once

#include "parts.h"

constexpr int64_t PANEL = 32;

struct Matrix {
    const bf16* panels;  // [ceil(outputs / 32), inputs / 2, 32, 2]
    const bf16* bias;    // [outputs], or null
    int64_t outputs, inputs;
};

struct Acc {
    __m512 low, high;  // outputs 0 to 15 and 16 to 31 of a panel
};

template <int ROWS, class Keep>
static inline void panel_rows(const bf16* panel, const bf16* x, int64_t stride, int64_t pairs, const Keep& keep) {
    __m512 low[ROWS], high[ROWS];
    for (int r = 0; r < ROWS; r++) low[r] = high[r] = _mm512_setzero_ps();
    for (int64_t k = 0; k < pairs; k++) {
        const bf16* w = panel + k * 2 * PANEL;
        if (ROWS <= 4) {  // so few rows are bound by memory: prefetch the weights 3 KiB ahead
            _mm_prefetch((const char*)(w + 24 * 2 * PANEL), _MM_HINT_T0);
            _mm_prefetch((const char*)(w + 24 * 2 * PANEL + PANEL), _MM_HINT_T0);
        }
        const __m512bh w_low = (__m512bh)_mm512_loadu_si512(w);
        const __m512bh w_high = (__m512bh)_mm512_loadu_si512(w + 32);
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; r++) {
            int32_t pair;
            std::memcpy(&pair, x + r * stride + 2 * k, 4);
            const __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
            low[r] = _mm512_dpbf16_ps(low[r], w_low, both);
            high[r] = _mm512_dpbf16_ps(high[r], w_high, both);
        }
    }
    for (int r = 0; r < ROWS; r++) keep(r, Acc{low[r], high[r]});
}

template <class Keep>
static inline void panel_some(int rows, const bf16* panel, const bf16* x, int64_t stride, int64_t pairs,
                              const Keep& keep) {
    switch (rows) {
#define SOME(N) \
    case N: return panel_rows<N>(panel, x, stride, pairs, keep);
        SOME(1) SOME(2) SOME(3) SOME(4) SOME(5) SOME(6) SOME(7) SOME(8) SOME(9) SOME(10) SOME(11) SOME(12)
#undef SOME
    }
}

static inline Acc with_bias(Acc acc, const Matrix& m, int64_t panel) {
    if (!m.bias) return acc;
    const int64_t n = panel * PANEL;
    acc.low = _mm512_add_ps(acc.low, load16(m.bias + n, lanes(m.outputs - n)));
    acc.high = _mm512_add_ps(acc.high, load16(m.bias + n + 16, lanes(m.outputs - n - 16)));
    return acc;
}

// Multiplies panels `part` with all rows; `keep(row, panel, acc)` receives the results with the bias added.
template <class Keep>
static inline void multiply(const Matrix& m, const bf16* x, int64_t stride, int64_t rows, Part part, const Keep& keep) {
    const int64_t pairs = m.inputs / 2;
    for (int64_t panel = part.begin; panel < part.end; panel++) {
        const bf16* w = m.panels + panel * pairs * 2 * PANEL;
        for (int64_t row = 0; row < rows; row += 12) {
            const int some = (int)(rows - row < 12 ? rows - row : 12);
            panel_some(some, w, x + row * stride, stride, pairs,
                       [&](int r, Acc acc) { keep(row + r, panel, with_bias(acc, m, panel)); });
        }
    }
}

static inline int64_t panels_of(const Matrix& m) { return (m.outputs + PANEL - 1) / PANEL; }

// Stores results as bf16 rows of `stride`; `residual`, if any, is added first (it may be `y` itself).
struct Store {
    bf16* y;
    int64_t stride, outputs;
    const bf16* residual;
    int64_t residual_stride;

    void operator()(int64_t row, int64_t panel, Acc acc) const {
        for (int half = 0; half < 2; half++) {
            const int64_t n = panel * PANEL + 16 * half;
            const __mmask16 mask = lanes(outputs - n);
            if (!mask) return;
            __m512 v = half ? acc.high : acc.low;
            if (residual) v = _mm512_add_ps(v, load16(residual + row * residual_stride + n, mask));
            store16(y + row * stride + n, v, mask);
        }
    }
};

// Stores SiLU(gate) * up: a panel holds 16 gates and the 16 ups that they are multiplied with.
struct SiluMul {
    bf16* y;
    int64_t stride, width;

    void operator()(int64_t row, int64_t panel, Acc acc) const {
        const int64_t n = panel * (PANEL / 2);
        store16(y + row * stride + n, _mm512_mul_ps(silu16(acc.low), acc.high), lanes(width - n));
    }
};
