// Attention of packed queries over paged keys, one query and one key-value head at a time.
//
// The keys of a query are listed as cache rows in text order: the prefix, then the nodes on its path. A tree node
// therefore adds the same numbers in the same order as a token of plain decoding.
#pragma once

#include <vector>

#include "parts.h"

struct Paged {
    bf16 *keys, *values;         // [block * position, kv_head, head_dim] of one layer
    const int64_t* block_table;  // [B, blocks]
    int64_t blocks, block_size;  // columns of block_table, positions of a block
    const int64_t *prefix, *first, *query_start;  // [B], [B], [B + 1]: cached keys, hidden oldest keys, first query
    const int64_t* ancestors;                     // [T] bit mask of the rows after the prefix, 0: causal
    int64_t sequences;
};

struct Heads {
    int64_t queries, keys, size;  // H, K, D
};

static inline void visible_rows(const Paged& p, int64_t b, int64_t own, uint64_t ancestors, std::vector<int32_t>& rows) {
    const int64_t* table = p.block_table + b * p.blocks;
    const auto row_of = [&](int64_t i) { return (int32_t)(table[i / p.block_size] * p.block_size + i % p.block_size); };
    rows.clear();
    for (int64_t i = p.first[b]; i < p.prefix[b]; i++) rows.push_back(row_of(i));
    for (int64_t j = 0; ancestors == 0 ? j <= own : j < 64 && ancestors >> j; j++)
        if ((ancestors == 0 || ancestors >> j & 1) && p.prefix[b] + j >= p.first[b])
            rows.push_back(row_of(p.prefix[b] + j));
}

// Sums the lanes of each of 16 registers; lane i of the result is the sum of register i.
static inline __m512 sums16(const __m512* x) {
    alignas(64) __m512 a[8], b[4];
    for (int i = 0; i < 8; i++)
        a[i] = _mm512_add_ps(_mm512_unpacklo_ps(x[2 * i], x[2 * i + 1]), _mm512_unpackhi_ps(x[2 * i], x[2 * i + 1]));
    for (int i = 0; i < 4; i++)
        b[i] = _mm512_add_ps(
            _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a[2 * i]), _mm512_castps_pd(a[2 * i + 1]))),
            _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a[2 * i]), _mm512_castps_pd(a[2 * i + 1]))));
    const __m512 c = _mm512_add_ps(_mm512_shuffle_f32x4(b[0], b[1], 0x88), _mm512_shuffle_f32x4(b[0], b[1], 0xdd));
    const __m512 d = _mm512_add_ps(_mm512_shuffle_f32x4(b[2], b[3], 0x88), _mm512_shuffle_f32x4(b[2], b[3], 0xdd));
    return _mm512_add_ps(_mm512_shuffle_f32x4(c, d, 0x88), _mm512_shuffle_f32x4(c, d, 0xdd));
}

// Sets scores[i] = scale * q . key(rows[i]), in groups of 16, with -inf after the last. Returns the largest score.
template <int SIZE>
static inline float score(const bf16* q, const bf16* keys, int64_t stride, const int32_t* rows, int64_t count,
                          float scale, float* scores) {
    constexpr int WORDS = SIZE / 32;
    __m512bh query[WORDS];
    for (int w = 0; w < WORDS; w++) query[w] = (__m512bh)_mm512_loadu_si512(q + 32 * w);
    __m512 most = _mm512_set1_ps(-INFINITY);
    for (int64_t i = 0; i < count; i += 16) {
        __m512 dots[16];
        for (int j = 0; j < 16; j++) {
            const int64_t at = i + j < count ? i + j : count - 1;
            const bf16* key = keys + rows[at] * stride;
            dots[j] = _mm512_setzero_ps();
            for (int w = 0; w < WORDS; w++)
                dots[j] = _mm512_dpbf16_ps(dots[j], query[w], (__m512bh)_mm512_loadu_si512(key + 32 * w));
        }
        const __m512 scaled = _mm512_mul_ps(sums16(dots), _mm512_set1_ps(scale));
        const __m512 masked = _mm512_mask_blend_ps(lanes(count - i), _mm512_set1_ps(-INFINITY), scaled);
        _mm512_storeu_ps(scores + i, masked);
        most = _mm512_max_ps(most, masked);
    }
    return _mm512_reduce_max_ps(most);
}

static inline float weigh(float* scores, int64_t count, float most) {
    __m512 total = _mm512_setzero_ps();
    for (int64_t i = 0; i < count; i += 16) {
        const __m512 shifted = _mm512_sub_ps(_mm512_loadu_ps(scores + i), _mm512_set1_ps(most));
        const __m512 weight = _mm512_maskz_mov_ps(lanes(count - i), exp16(shifted));
        _mm512_storeu_ps(scores + i, weight);
        total = _mm512_add_ps(total, weight);
    }
    return _mm512_reduce_add_ps(total);
}

template <int SIZE>
static inline void mix(const bf16* values, int64_t stride, const int32_t* rows, int64_t count, const float* weights,
                       float total, bf16* out) {
    constexpr int WORDS = SIZE / 16;
    __m512 sum[WORDS];
    for (int w = 0; w < WORDS; w++) sum[w] = _mm512_setzero_ps();
    for (int64_t i = 0; i < count; i++) {
        const bf16* value = values + rows[i] * stride;
        const __m512 weight = _mm512_set1_ps(weights[i]);
        for (int w = 0; w < WORDS; w++) sum[w] = _mm512_fmadd_ps(weight, load16(value + 16 * w), sum[w]);
    }
    const __m512 share = _mm512_set1_ps(1.0f / total);
    for (int w = 0; w < WORDS; w++) store16(out + 16 * w, _mm512_mul_ps(sum[w], share));
}

// Attends one query head over `rows`; writes zeros if there are none.
template <int SIZE>
static inline void attend_head(const Paged& p, const Heads& heads, const bf16* q, int64_t kv, float scale,
                               const std::vector<int32_t>& rows, std::vector<float>& scores, bf16* out) {
    const int64_t stride = heads.keys * SIZE, count = (int64_t)rows.size();
    if (!count) return (void)std::memset(out, 0, SIZE * sizeof(bf16));
    scores.resize((count + 15) / 16 * 16);
    const float most = score<SIZE>(q, p.keys + kv * SIZE, stride, rows.data(), count, scale, scores.data());
    const float total = weigh(scores.data(), count, most);
    mix<SIZE>(p.values + kv * SIZE, stride, rows.data(), count, scores.data(), total, out);
}
