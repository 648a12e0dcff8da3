/* Gradient of a 3×3 convolution (stride t = 1 or 2, padding 1) with respect to its weights, channels innermost:

       dw[o, r, s, c] = Σ_{image, h, w} g[image, h, w, o] · x[image, t h + r - 1, t w + s - 1, c]

   A tile of OUTPUTS output channels, 3 taps s and one vector of input channels stays in registers while all pixels of a
   group of images go by: each pixel costs t loads of x, since the taps share them, and OUTPUTS of g, for 3 OUTPUTS
   multiply-adds. OUTPUTS is 4 with AVX2 (LANES = 8, 16 registers), 8 with AVX-512 (LANES = 16, 32 registers).
   Groups of images are copied first into panels of LANES channels of x, with a frame of zeros, and of OUTPUTS channels of
   g, which the caches hold. */

#include <stdlib.h>
#include <string.h>

enum { OUTPUTS = LANES / 2, TAPS = 3 };
typedef float vec __attribute__((vector_size(4 * LANES), aligned(4)));

typedef struct {
    long height, width; /* of g */
    long x_row, x_image, g_image;
} shape;

static inline __attribute__((always_inline)) void tile(shape s, const long stride, long images, const float *x,
                                                       const float *g, float *dw, long next_output, long next_tap)
{
    vec sum[OUTPUTS][TAPS] = {{{0}}};
    for (long i = 0; i < images; i++)
        for (long h = 0; h < s.height; h++) {
            const float *row = x + i * s.x_image + h * stride * s.x_row;
            const float *up = g + i * s.g_image + h * s.width * OUTPUTS;
            vec left = *(const vec *)row, middle = *(const vec *)(row + LANES);
            for (long w = 0; w < s.width; w++) {
                vec right = *(const vec *)(row + (w * stride + 2) * LANES);
                for (int o = 0; o < OUTPUTS; o++) {
                    float weight = up[w * OUTPUTS + o];
                    sum[o][0] += weight * left;
                    sum[o][1] += weight * middle;
                    sum[o][2] += weight * right;
                }
                left = stride == 1 ? middle : right;
                middle = stride == 1 ? right : *(const vec *)(row + (w * stride + 3) * LANES);
            }
        }
    for (int o = 0; o < OUTPUTS; o++)
        for (int t = 0; t < TAPS; t++)
            *(vec *)(dw + o * next_output + t * next_tap) += sum[o][t];
}

/* The rows `first` to `last` of dw, (outputs, 3, 3, inputs), from x of height × width pixels. */
static int rows(const float *x, const float *g, float *dw, long batch, long height, long width, long inputs,
                long outputs, long stride, long first, long last)
{
    shape s = {.height = (height - 1) / stride + 1, .width = (width - 1) / stride + 1};
    s.x_row = (width + 3) * LANES; /* one pixel more than the frame needs: stride 2 looks ahead */
    s.x_image = (height + 2) * s.x_row;
    s.g_image = s.height * s.width * OUTPUTS;
    long x_panels = inputs / LANES, g_panels = (last - first) / OUTPUTS;
    long group = 1024 / (height * width);
    group = group < 1 ? 1 : group < batch ? group : batch;
    float *xs = calloc(x_panels * group * s.x_image, sizeof(float));
    float *gs = malloc(g_panels * group * s.g_image * sizeof(float));
    if (!xs || !gs) {
        free(xs);
        free(gs);
        return 1;
    }
    memset(dw + first * 9 * inputs, 0, (last - first) * 9 * inputs * sizeof(float));
    for (long begin = 0; begin < batch; begin += group) {
        long images = batch - begin < group ? batch - begin : group;
        for (long i = 0; i < images; i++)
            for (long h = 0; h < height; h++)
                for (long w = 0; w < width; w++) {
                    const float *from = x + (((begin + i) * height + h) * width + w) * inputs;
                    float *to = xs + i * s.x_image + (h + 1) * s.x_row + (w + 1) * LANES;
                    for (long p = 0; p < x_panels; p++)
                        memcpy(to + p * group * s.x_image, from + p * LANES, LANES * sizeof(float));
                }
        for (long i = 0; i < images; i++)
            for (long k = 0; k < s.height * s.width; k++) {
                const float *from = g + ((begin + i) * s.height * s.width + k) * outputs + first;
                float *to = gs + i * s.g_image + k * OUTPUTS;
                for (long p = 0; p < g_panels; p++)
                    memcpy(to + p * group * s.g_image, from + p * OUTPUTS, OUTPUTS * sizeof(float));
            }
        for (long c = 0; c < x_panels; c++)
            for (long o = 0; o < g_panels; o++)
                for (long r = 0; r < TAPS; r++) {
                    const float *xp = xs + c * group * s.x_image + r * s.x_row, *gp = gs + o * group * s.g_image;
                    float *to = dw + ((first + o * OUTPUTS) * 9 + r * TAPS) * inputs + c * LANES;
                    if (stride == 1)
                        tile(s, 1, images, xp, gp, to, 9 * inputs, inputs);
                    else
                        tile(s, 2, images, xp, gp, to, 9 * inputs, inputs);
                }
    }
    free(xs);
    free(gs);
    return 0;
}

/* Returns 0, or 1 if there is no memory. Each thread has some output channels. */
int weight_gradient(const float *x, const float *g, float *dw, long batch, long height, long width, long inputs,
                    long outputs, long stride, long threads)
{
    int failed = 0;
    long blocks = outputs / OUTPUTS;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(| : failed)
    for (long k = 0; k < threads; k++)
        failed |= rows(x, g, dw, batch, height, width, inputs, outputs, stride, blocks * k / threads * OUTPUTS,
                       blocks * (k + 1) / threads * OUTPUTS);
    return failed;
}
