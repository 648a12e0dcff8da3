/* A 3×3 convolution (stride 1, padding 1), pixels with their channels together, in Winograd's form F(2×2, 3×3): each tile
   of 2×2 outputs, from the 4×4 inputs d around it, costs 16 multiplications per pair of channels instead of 36,

       y[o] = Aᵀ (Σ_c u[o, c] ⊙ v[c]) A + bias[o],    v[c] = Bᵀ d[c] B,    u[o, c] = G w[o, c] Gᵀ,

            1  0 -1  0                                                   1   0   0
       Bᵀ = 0  1  1  0      Aᵀ = 1  1  1  0                        G =  1/2 1/2 1/2
            0 -1  1  0           0  1 -1 -1                             1/2-1/2 1/2
            0  1  0 -1                                                   0   0   1

   so that the sum over c is 16 products of matrices, (tiles, inputs) by (inputs, outputs), one for each point of a tile.
   They are computed for as many tiles as the cache holds, and for panels of two vectors of outputs, which stay in
   registers for some tiles while the input channels go by: 6 tiles with AVX2 (LANES = 8, 16 registers), 12 with AVX-512
   (LANES = 16, 32 registers). u is (outputs / PANEL, 16 points, inputs, PANEL). */

#include <stdlib.h>
#include <string.h>

enum { PANEL = 2 * LANES, POINTS = 16, TILES = LANES == 16 ? 12 : 6, BLOCK = 4096 };
typedef float vec __attribute__((vector_size(4 * LANES), aligned(4)));

typedef struct {
    long height, width, inputs, outputs;
} shape;

typedef struct {
    long image, top, left;
} place;

static place place_of(shape s, long tile)
{
    long across = (s.width + 1) / 2, image = (s.height + 1) / 2 * across;
    return (place){tile / image, tile % image / across * 2, tile % across * 2};
}

static place after(shape s, place at)
{
    at.left += 2;
    if (at.left >= s.width) {
        at.left = 0;
        at.top += 2;
    }
    if (at.top >= s.height) {
        at.top = 0;
        at.image++;
    }
    return at;
}

/* v of one tile: 16 points `next` apart. */
static void transform_input(shape s, place at, const float *x, const float *zeros, float *v, long next)
{
    const float *d[4][4];
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++) {
            long h = at.top + i - 1, w = at.left + j - 1;
            int inside = h >= 0 && h < s.height && w >= 0 && w < s.width;
            d[i][j] = inside ? x + ((at.image * s.height + h) * s.width + w) * s.inputs : zeros;
        }
    for (long c = 0; c < s.inputs; c += LANES) {
        vec t[4][4];
        for (int j = 0; j < 4; j++) {
            vec d0 = *(const vec *)(d[0][j] + c), d1 = *(const vec *)(d[1][j] + c);
            vec d2 = *(const vec *)(d[2][j] + c), d3 = *(const vec *)(d[3][j] + c);
            t[0][j] = d0 - d2;
            t[1][j] = d1 + d2;
            t[2][j] = d2 - d1;
            t[3][j] = d1 - d3;
        }
        for (int i = 0; i < 4; i++) {
            float *row = v + i * 4 * next + c;
            *(vec *)row = t[i][0] - t[i][2];
            *(vec *)(row + next) = t[i][1] + t[i][2];
            *(vec *)(row + 2 * next) = t[i][2] - t[i][1];
            *(vec *)(row + 3 * next) = t[i][1] - t[i][3];
        }
    }
}

/* One point of TILES tiles, for one panel of outputs. */
static void multiply(const float *v, const float *u, float *m, long inputs)
{
    vec sum[TILES][2] = {{{0}}};
    for (long c = 0; c < inputs; c++) {
        vec low = *(const vec *)(u + c * PANEL), high = *(const vec *)(u + c * PANEL + LANES);
        for (int t = 0; t < TILES; t++) {
            float value = v[t * inputs + c];
            sum[t][0] += value * low;
            sum[t][1] += value * high;
        }
    }
    for (int t = 0; t < TILES; t++) {
        *(vec *)(m + t * POINTS * PANEL) = sum[t][0];
        *(vec *)(m + t * POINTS * PANEL + LANES) = sum[t][1];
    }
}

/* 2×2 pixels of y, or those that are inside, for one panel of outputs. */
static void transform_output(shape s, place at, const float *m, const float *bias, float *y)
{
    for (int o = 0; o < PANEL; o += LANES) {
        vec t[2][4], b = bias ? *(const vec *)(bias + o) : (vec){0};
        for (int j = 0; j < 4; j++) {
            vec m0 = *(const vec *)(m + j * PANEL + o), m1 = *(const vec *)(m + (4 + j) * PANEL + o);
            vec m2 = *(const vec *)(m + (8 + j) * PANEL + o), m3 = *(const vec *)(m + (12 + j) * PANEL + o);
            t[0][j] = m0 + m1 + m2;
            t[1][j] = m1 - m2 - m3;
        }
        for (int i = 0; i < 2 && at.top + i < s.height; i++) {
            float *pixel = y + ((at.image * s.height + at.top + i) * s.width + at.left) * s.outputs + o;
            *(vec *)pixel = t[i][0] + t[i][1] + t[i][2] + b;
            if (at.left + 1 < s.width)
                *(vec *)(pixel + s.outputs) = t[i][1] - t[i][2] - t[i][3] + b;
        }
    }
}

/* The tiles from `first` to `last`, which are counted through all images. */
static int some(const float *x, const float *u, const float *bias, float *y, long height, long width,
                long inputs, long outputs, long first, long last)
{
    shape s = {height, width, inputs, outputs};
    long most = BLOCK / (inputs * TILES) > 1 ? BLOCK / (inputs * TILES) * TILES : TILES;
    long next = most * inputs + PANEL; /* not a power of two, or the points would share lines of the cache */
    float *zeros = aligned_alloc(64, (inputs + POINTS * next + most * POINTS * PANEL + PANEL) * sizeof(float) / 64 * 64);
    if (!zeros)
        return 1;
    float *v = zeros + (inputs + PANEL - 1) / PANEL * PANEL, *m = v + POINTS * next;
    memset(zeros, 0, inputs * sizeof(float));
    for (long begin = first; begin < last; begin += most) {
        long count = last - begin < most ? last - begin : most;
        place start = place_of(s, begin), at = start;
        for (long t = 0; t < count; t++, at = after(s, at))
            transform_input(s, at, x, zeros, v + t * inputs, next);
        for (long o = 0; o < outputs; o += PANEL) {
            for (long k = 0; k < POINTS; k++)
                for (long t = 0; t < count; t += TILES)
                    multiply(v + k * next + t * inputs, u + (o * POINTS + k * PANEL) * inputs,
                             m + (t * POINTS + k) * PANEL, inputs);
            at = start;
            for (long t = 0; t < count; t++, at = after(s, at))
                transform_output(s, at, m + t * POINTS * PANEL, bias ? bias + o : bias, y + o);
        }
    }
    free(zeros);
    return 0;
}

/* Returns 0, or 1 if there is no memory. Each thread has some groups of tiles. */
int winograd(const float *x, const float *u, const float *bias, float *y, long batch, long height, long width,
             long inputs, long outputs, long threads)
{
    int failed = 0;
    long tiles = batch * ((height + 1) / 2) * ((width + 1) / 2), groups = (tiles + TILES - 1) / TILES;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(| : failed)
    for (long k = 0; k < threads; k++) {
        long last = groups * (k + 1) / threads * TILES;
        failed |= some(x, u, bias, y, height, width, inputs, outputs, groups * k / threads * TILES,
                       last < tiles ? last : tiles);
    }
    return failed;
}
