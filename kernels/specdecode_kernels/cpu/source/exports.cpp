// Functions that Python calls; ops.py documents what they compute. Threads come from PyTorch's OpenMP pool.
#include <omp.h>

#include "attention.h"
#include "linear.h"

template <class Body>
static void in_parallel(int threads, const Body& body) {
    if (threads == 1) return body(0, 1);
#pragma omp parallel num_threads(threads)
    body(omp_get_thread_num(), omp_get_num_threads());
}

static inline void wait_for_all(int threads) {
    if (threads > 1) {
#pragma omp barrier
    }
}

struct Norm {
    const bf16* weight;  // null: no norm
    float eps;
};

// Rotates one row [heads, size] in place by cos and sin [size], in half-split layout.
static void turn(bf16* x, const bf16* cos, const bf16* sin, int64_t heads, int64_t size) {
    const int64_t half = size / 2;
    for (int64_t h = 0; h < heads; h++, x += size)
        for (int64_t i = 0; i < half; i += 16) {
            const __mmask16 m = lanes(half - i);
            const __m512 a = load16(x + i, m), b = load16(x + half + i, m);
            const __m512 first = _mm512_fmsub_ps(a, load16(cos + i, m), _mm512_mul_ps(b, load16(sin + i, m)));
            const __m512 second =
                _mm512_fmadd_ps(b, load16(cos + half + i, m), _mm512_mul_ps(a, load16(sin + half + i, m)));
            store16(x + i, first, m);
            store16(x + half + i, second, m);
        }
}

extern "C" {

// weight [outputs, inputs] -> panels, with zeros after the last output
void sd_pack(const bf16* weight, int64_t outputs, int64_t inputs, bf16* panels) {
    const int64_t padded = (outputs + PANEL - 1) / PANEL * PANEL;
    for (int64_t n = 0; n < padded; n++)
        for (int64_t k = 0; k < inputs; k++)
            panels[(n / PANEL * (inputs / 2) + k / 2) * 2 * PANEL + n % PANEL * 2 + k % 2] =
                n < outputs ? weight[n * inputs + k] : (bf16)0;
}

void sd_linear(const Matrix* m, const bf16* x, int64_t stride, int64_t rows, bf16* y, int threads) {
    in_parallel(threads, [&](int index, int count) {
        multiply(*m, x, stride, rows, part_of(panels_of(*m), index, count), Store{y, m->outputs, m->outputs, nullptr, 0});
    });
}

void sd_norm(const Norm* norm, const bf16* x, int64_t rows, int64_t size, bf16* y, int threads) {
    in_parallel(rows < 64 ? 1 : threads, [&](int index, int count) {
        const Part mine = part_of(rows, index, count);
        for (int64_t r = mine.begin; r < mine.end; r++) rms_norm(x + r * size, norm->weight, norm->eps, size, y + r * size);
    });
}

// x -> norm -> one matrix for queries, keys and values -> norms of heads -> rotation
struct Entry {
    Matrix qkv;
    Norm norm;
    const bf16* head_norm;  // [H + K, D], or null
    float head_eps;
    Heads heads;
};

void sd_entry(const Entry* e, const bf16* x, int64_t rows, const bf16* cos, const bf16* sin, bf16* normed, bf16* out,
              int threads) {
    const int64_t width = e->qkv.outputs, turning = e->heads.queries + e->heads.keys, size = e->heads.size;
    const bf16* input = e->norm.weight ? normed : x;
    in_parallel(threads, [&](int index, int count) {
        const Part mine = part_of(rows, index, count);
        if (e->norm.weight) {
            for (int64_t r = mine.begin; r < mine.end; r++)
                rms_norm(x + r * e->qkv.inputs, e->norm.weight, e->norm.eps, e->qkv.inputs, normed + r * e->qkv.inputs);
            wait_for_all(count);
        }
        multiply(e->qkv, input, e->qkv.inputs, rows, part_of(panels_of(e->qkv), index, count),
                 Store{out, width, width, nullptr, 0});
        wait_for_all(count);
        for (int64_t r = mine.begin; r < mine.end; r++) {
            if (e->head_norm)
                for (int64_t h = 0; h < turning; h++)
                    rms_norm(out + r * width + h * size, e->head_norm + h * size, e->head_eps, size,
                             out + r * width + h * size);
            turn(out + r * width, cos + r * size, sin + r * size, turning, size);
        }
    });
}

// Writes keys and values [T, K, D] to their slots, then attends queries [T, H, D]; all three have row stride `stride`.
void sd_attend(const Paged* p, const Heads* heads, const bf16* q, const bf16* k, const bf16* v, int64_t stride,
               const int64_t* slots, int64_t rows, float scale, bf16* out, int threads) {
    const int64_t size = heads->size, width = heads->keys * size, groups = heads->queries / heads->keys;
    in_parallel(threads, [&](int index, int count) {
        const Part mine = part_of(rows, index, count);
        for (int64_t t = mine.begin; t < mine.end; t++) {
            std::memcpy(p->keys + slots[t] * width, k + t * stride, width * sizeof(bf16));
            std::memcpy(p->values + slots[t] * width, v + t * stride, width * sizeof(bf16));
        }
        wait_for_all(count);
        std::vector<int32_t> seen;
        std::vector<float> scores;
        // Few queries are split by heads. Many queries are kept whole, so that their visible rows are listed once.
        const int64_t share = rows * heads->keys < 8 * count ? 1 : heads->queries;
        const int64_t pieces = heads->queries / share;
        const Part tasks = part_of(rows * pieces, index, count);
        int64_t b = 0, listed = -1;
        for (int64_t task = tasks.begin; task < tasks.end; task++) {
            const int64_t t = task / pieces;
            while (p->query_start[b + 1] <= t) b++;
            if (listed != t) visible_rows(*p, b, t - p->query_start[b], (uint64_t)p->ancestors[t], seen), listed = t;
            for (int64_t h = task % pieces * share, last = h + share; h < last; h++) {
                const bf16* query = q + t * stride + h * size;
                bf16* to = out + (t * heads->queries + h) * size;
                switch (size) {
                    case 32: attend_head<32>(*p, *heads, query, h / groups, scale, seen, scores, to); break;
                    case 64: attend_head<64>(*p, *heads, query, h / groups, scale, seen, scores, to); break;
                    case 96: attend_head<96>(*p, *heads, query, h / groups, scale, seen, scores, to); break;
                    case 128: attend_head<128>(*p, *heads, query, h / groups, scale, seen, scores, to); break;
                }
            }
        }
    });
}

// residual + attended Wo -> x; x + down(SiLU(gate) * up) of the norm of x -> out
struct Tail {
    Matrix o, gate_up, down;
    Norm norm;
};

void sd_tail(const Tail* l, const bf16* attended, const bf16* residual, int64_t rows, bf16* x, bf16* normed, bf16* inner,
             bf16* out, int threads) {
    const int64_t size = l->o.outputs, width = l->down.inputs;
    in_parallel(threads, [&](int index, int count) {
        multiply(l->o, attended, l->o.inputs, rows, part_of(panels_of(l->o), index, count),
                 Store{x, size, size, residual, size});
        wait_for_all(count);
        const Part mine = part_of(rows, index, count);
        for (int64_t r = mine.begin; r < mine.end; r++)
            rms_norm(x + r * size, l->norm.weight, l->norm.eps, size, normed + r * size);
        wait_for_all(count);
        multiply(l->gate_up, normed, size, rows, part_of(panels_of(l->gate_up), index, count),
                 SiluMul{inner, width, width});
        wait_for_all(count);
        multiply(l->down, inner, width, rows, part_of(panels_of(l->down), index, count), Store{out, size, size, x, size});
    });
}
}
