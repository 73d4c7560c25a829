/* Prepares and runs one step through the C interface on whatever CUDA driver the loader finds, eager
 * and as a graph. Arguments: bundle, config file (a KdaConfig), step file (a KdaStep whose addresses
 * are offsets into the arena plus one page), arena file; the arena comes back in place, twice over:
 * as the eager launch left it, and as the replay did. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "prepared_kda.h"

#define EXPECT(condition)                                                                  \
    do {                                                                                   \
        if (!(condition)) {                                                                \
            fprintf(stderr, "line %d: %s; last error: %s\n", __LINE__, #condition,         \
                    kda_last_error());                                                     \
            exit(1);                                                                       \
        }                                                                                  \
    } while (0)

enum { PAGE = 4096 };

static void *cuda;

/* A driver function, cast by the caller; ISO C has no conversion from objects to functions. */
static void *symbol(const char *name) {
    void *found = dlsym(cuda, name);
    if (found == NULL) {
        fprintf(stderr, "the driver has no %s\n", name);
        exit(1);
    }
    return found;
}

#define DRIVER(name, ...)                                                                  \
    do {                                                                                   \
        union {                                                                            \
            void *object;                                                                  \
            int (*function)();                                                             \
        } found = {symbol(#name)};                                                         \
        int result = found.function(__VA_ARGS__);                                          \
        if (result != 0) {                                                                 \
            fprintf(stderr, "line %d: %s failed with %d\n", __LINE__, #name, result);      \
            exit(1);                                                                       \
        }                                                                                  \
    } while (0)

static void *read_file(const char *path, size_t *bytes) {
    FILE *file = fopen(path, "rb");
    EXPECT(file != NULL && fseek(file, 0, SEEK_END) == 0);
    *bytes = (size_t)ftell(file);
    rewind(file);
    void *data = malloc(*bytes);
    EXPECT(data != NULL && fread(data, 1, *bytes, file) == *bytes);
    fclose(file);
    return data;
}

static void rebase(uint64_t *address, uint64_t base) {
    if (*address != 0)
        *address = *address - PAGE + base;
}

static void rebase_step(KdaStep *step, uint64_t base) {
    KdaRows *rows[] = {&step->qkv,        &step->output_gate, &step->f_a,          &step->gate_input, &step->beta,
                       &step->conv_cache, &step->state,       &step->state_source, &step->slots,      &step->out,
                       &step->records};
    KdaBuffer *buffers[] = {&step->conv_weight, &step->conv_bias, &step->f_b,      &step->a_log,
                            &step->dt_bias,     &step->norm,      &step->accepted, &step->token_counts};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
        rebase(&rows[i]->buffer.address, base);
    for (size_t i = 0; i < sizeof buffers / sizeof buffers[0]; i++)
        rebase(&buffers[i]->address, base);
}

int main(int argc, char **argv) {
    EXPECT(argc == 5);
    size_t bytes, config_bytes, step_bytes;
    KdaConfig *config = read_file(argv[2], &config_bytes);
    KdaStep *step = read_file(argv[3], &step_bytes);
    unsigned char *arena = read_file(argv[4], &bytes);
    EXPECT(config_bytes == sizeof *config && step_bytes == sizeof *step);

    cuda = dlopen("libcuda.so.1", RTLD_NOW);
    EXPECT(cuda != NULL);
    void *context = NULL, *stream = NULL, *graph = NULL, *executable = NULL;
    uint64_t base = 0;
    DRIVER(cuInit, 0u);
    DRIVER(cuDevicePrimaryCtxRetain, &context, 0);
    DRIVER(cuCtxSetCurrent, context);
    DRIVER(cuStreamCreate, &stream, 1u);
    DRIVER(cuMemAlloc_v2, &base, bytes);
    rebase_step(step, base);

    KdaDevice *device = NULL;
    EXPECT(kda_device_borrow(context, &device) == KDA_STATUS_OK);
    KdaPolicy policy = {step->verify_tokens, 0, NULL};
    KdaSources sources;
    memset(&sources, 0, sizeof sources);
    sources.bundle_path = argv[1];
    sources.cache_folder = "off";
    sources.no_nvrtc = 1;
    KdaPrepared *prepared = NULL;
    EXPECT(kda_prepare(device, stream, config, &policy, 1, &sources, &prepared) == KDA_STATUS_OK);
    KdaKernelInfo info;
    EXPECT(kda_kernel_count(prepared) > 0);
    EXPECT(kda_kernel_info(prepared, 0, &info) == KDA_STATUS_OK && info.origin == KDA_ORIGIN_BUNDLE);

    FILE *results = fopen(argv[4], "wb");
    EXPECT(results != NULL);
    unsigned char *after = malloc(bytes);
    EXPECT(after != NULL);
    for (int captured = 0; captured < 2; captured++) {
        DRIVER(cuMemcpyHtoD_v2, base, arena, bytes);
        if (captured) {
            DRIVER(cuStreamBeginCapture_v2, stream, 0u);
            KdaFaults faults;
            EXPECT(kda_run(prepared, stream, step) == KDA_STATUS_OK);
            EXPECT(kda_take_faults(prepared, stream, &faults) == KDA_STATUS_CAPTURING);
            DRIVER(cuStreamEndCapture, stream, &graph);
            size_t nodes = 0;
            DRIVER(cuGraphGetNodes, graph, NULL, &nodes);
            EXPECT(nodes == 1);
            DRIVER(cuGraphInstantiateWithFlags, &executable, graph, 0ull);
            DRIVER(cuGraphLaunch, executable, stream);
        } else {
            EXPECT(kda_run(prepared, stream, step) == KDA_STATUS_OK);
        }
        KdaFaults faults;
        EXPECT(kda_take_faults(prepared, stream, &faults) == KDA_STATUS_OK && faults.count == 0);
        DRIVER(cuMemcpyDtoH_v2, after, base, bytes);
        EXPECT(fwrite(after, 1, bytes, results) == bytes);
    }
    EXPECT(fclose(results) == 0);

    /* The first request's first slot, zeroed for another request. */
    KdaPreparedReset *reset = NULL;
    EXPECT(kda_reset_prepare(device, stream, config, &sources, &reset) == KDA_STATUS_OK);
    KdaReset operands;
    memset(&operands, 0, sizeof operands);
    operands.requests = 1;
    operands.slots = step->slots;
    operands.slot_columns = 1;
    operands.conv_cache = step->conv_cache;
    operands.conv_length = step->conv_length;
    operands.state = step->state;
    operands.pool_slots = step->pool_slots;
    EXPECT(kda_reset_run(reset, stream, &operands) == KDA_STATUS_OK);
    DRIVER(cuStreamSynchronize, stream);
    DRIVER(cuMemcpyDtoH_v2, after, base, bytes);
    int32_t slot;
    memcpy(&slot, after + (step->slots.buffer.address - base), sizeof slot);
    size_t element = config->state_dtype == 0 ? 4 : 2;
    size_t state = step->state.buffer.address - base + (size_t)slot * step->state.stride * element;
    size_t line = step->conv_cache.buffer.address - base + (size_t)slot * step->conv_cache.stride * 2;
    for (size_t i = 0; i < config->heads * 128 * 128 * element; i++)
        EXPECT(after[state + i] == 0);
    for (size_t i = 0; i < config->heads * 3 * 128 * step->conv_length * 2; i++)
        EXPECT(after[line + i] == 0);
    operands.conv_length = 0x7fffffff;
    EXPECT(kda_reset_run(reset, stream, &operands) == KDA_STATUS_BAD_OPERAND);
    kda_reset_destroy(reset);

    /* The caller's context stays current throughout. */
    void *current = NULL;
    DRIVER(cuCtxGetCurrent, &current);
    EXPECT(current == context);
    kda_prepared_destroy(prepared);
    kda_device_destroy(device);
    printf("%s\n", "done");
    return 0;
}
