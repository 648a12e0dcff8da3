/* Gradient of a 3×3 convolution (stride 1, padding 1) with respect to its weights, pixels with their channels together:

       dw[o, r, s, c] = Σ_{image, h, w} g[image, h, w, o] · x[image, h + r - 1, w + s - 1, c]

   A tile of 4 output channels, 3 taps s and 8 input channels stays in 12 vector registers while all pixels of a group of
   images go by: each pixel costs one load of x, since the three taps share it, and four of g, for 12 multiply-adds.
   Groups of images are copied first into panels of 8 channels of x, with a frame of zeros, and of 4 channels of g, which
   the caches hold. */

#include <stdlib.h>
#include <string.h>

enum { LANES = 8, OUTPUTS = 4, TAPS = 3 };
typedef float vec __attribute__((vector_size(4 * LANES), aligned(4)));

typedef struct {
    long height, width, x_image, g_image;
} shape;

static void tile(shape s, long images, const float *x, const float *g, float *dw, long next_output, long next_tap)
{
    vec sum[OUTPUTS][TAPS] = {{{0}}};
    for (long i = 0; i < images; i++)
        for (long h = 0; h < s.height; h++) {
            const float *row = x + i * s.x_image + h * (s.width + 2) * LANES;
            const float *up = g + i * s.g_image + h * s.width * OUTPUTS;
            vec left = *(const vec *)row, middle = *(const vec *)(row + LANES);
            for (long w = 0; w < s.width; w++) {
                vec right = *(const vec *)(row + (w + 2) * LANES);
                for (int o = 0; o < OUTPUTS; o++) {
                    float weight = up[w * OUTPUTS + o];
                    sum[o][0] += weight * left;
                    sum[o][1] += weight * middle;
                    sum[o][2] += weight * right;
                }
                left = middle;
                middle = right;
            }
        }
    for (int o = 0; o < OUTPUTS; o++)
        for (int t = 0; t < TAPS; t++)
            *(vec *)(dw + o * next_output + t * next_tap) += sum[o][t];
}

/* The rows `first` to `last` of dw, (outputs, 3, 3, inputs). Returns 0, or 1 if there is no memory. */
int weight_gradient(const float *x, const float *g, float *dw, long batch, long height, long width, long inputs,
                    long outputs, long first, long last)
{
    shape s = {height, width, (height + 2) * (width + 2) * LANES, height * width * OUTPUTS};
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
                    long pixel = ((begin + i) * height + h) * width + w;
                    for (long p = 0; p < x_panels; p++)
                        memcpy(xs + (p * group + i) * s.x_image + ((h + 1) * (width + 2) + w + 1) * LANES,
                               x + pixel * inputs + p * LANES, LANES * sizeof(float));
                    for (long p = 0; p < g_panels; p++)
                        memcpy(gs + (p * group + i) * s.g_image + (h * width + w) * OUTPUTS,
                               g + pixel * outputs + first + p * OUTPUTS, OUTPUTS * sizeof(float));
                }
        for (long c = 0; c < x_panels; c++)
            for (long o = 0; o < g_panels; o++)
                for (long r = 0; r < TAPS; r++)
                    tile(s, images, xs + c * group * s.x_image + r * (width + 2) * LANES, gs + o * group * s.g_image,
                         dw + ((first + o * OUTPUTS) * 9 + r * TAPS) * inputs + c * LANES, 9 * inputs, inputs);
    }
    free(xs);
    free(gs);
    return 0;
}
