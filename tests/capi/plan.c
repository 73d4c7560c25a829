/* Uses every function of the C interface without a GPU: what needs a device fails with its status
 * and text, what does not is planned and compared. Arguments: bundle file, cache folder, a file to
 * write a policy file to. */
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

enum { HEADS = 2, DIM = HEADS * 128, PITCH = 4 * DIM + 128 + HEADS, SLOTS = 5 };

static KdaRows rows(uint64_t address, size_t elements, int64_t stride) {
    KdaRows rows = {{address, elements}, stride};
    return rows;
}

static KdaBuffer buffer(uint64_t address, size_t elements) {
    KdaBuffer buffer = {address, elements};
    return buffer;
}

static KdaStep valid_step(void) {
    const uint64_t far = (uint64_t)1 << 32;
    KdaStep step;
    memset(&step, 0, sizeof step);
    step.requests = 3;
    step.qkv = rows(far, 3 * PITCH, PITCH);
    step.output_gate = rows(far + 2 * 3 * DIM, 3 * PITCH - 3 * DIM, PITCH);
    step.f_a = rows(far + 2 * 4 * DIM, 3 * PITCH - 4 * DIM, PITCH);
    step.beta = rows(far + 2 * (4 * DIM + 128), 3 * PITCH - 4 * DIM - 128, PITCH);
    step.conv_weight = buffer(2 * far, 12 * DIM);
    step.f_b = buffer(3 * far, DIM * 128);
    step.a_log = buffer(4 * far, HEADS);
    step.dt_bias = buffer(5 * far, DIM);
    step.norm = buffer(6 * far, 128);
    step.conv_cache = rows(7 * far, SLOTS * 9 * DIM, 9 * DIM);
    step.conv_length = 3;
    step.state = rows(8 * far, SLOTS * DIM * 128, DIM * 128);
    step.pool_slots = SLOTS;
    step.slots = rows(9 * far, 3, 1);
    step.slot_columns = 1;
    step.out = rows(11 * far, 3 * DIM, DIM);
    return step;
}

static void device_part(const KdaConfig *config) {
    KdaDevice *device = NULL;
    KdaPrepared *prepared = NULL;
    KdaFaults faults;
    KdaKernelInfo info;
    KdaStep step = valid_step();
    EXPECT(kda_device_primary(0, NULL) == KDA_STATUS_NULL_POINTER);
    EXPECT(strcmp(kda_last_error(), "device is NULL") == 0);
    EXPECT(kda_device_borrow(NULL, &device) == KDA_STATUS_NULL_POINTER);
    EXPECT(strcmp(kda_last_error(), "context is NULL") == 0);
    KdaStatus status = kda_device_primary(1 << 20, &device);
    EXPECT(status == KDA_STATUS_NO_DRIVER || status == KDA_STATUS_CUDA);
    if (status == KDA_STATUS_NO_DRIVER)
        EXPECT(strcmp(kda_last_error(), "the CUDA driver library was not found") == 0);
    EXPECT(device == NULL);
    EXPECT(kda_prepare(NULL, NULL, config, NULL, 0, NULL, &prepared) == KDA_STATUS_NULL_POINTER);
    EXPECT(kda_run(NULL, NULL, &step) == KDA_STATUS_NULL_POINTER);
    EXPECT(strcmp(kda_last_error(), "prepared is NULL") == 0);
    EXPECT(kda_take_faults(NULL, NULL, &faults) == KDA_STATUS_NULL_POINTER);
    EXPECT(kda_peek_faults(NULL, &faults) == KDA_STATUS_NULL_POINTER);
    EXPECT(kda_kernel_count(NULL) == 0);
    EXPECT(kda_kernel_info(NULL, 0, &info) == KDA_STATUS_NULL_POINTER);
    kda_prepared_destroy(NULL);
    KdaPreparedReset *reset = NULL;
    KdaReset operands = {0};
    EXPECT(kda_reset_prepare(NULL, NULL, config, NULL, &reset) == KDA_STATUS_NULL_POINTER);
    EXPECT(kda_reset_run(NULL, NULL, &operands) == KDA_STATUS_NULL_POINTER);
    EXPECT(strcmp(kda_last_error(), "reset is NULL") == 0);
    kda_reset_destroy(reset);
    kda_device_destroy(NULL);
}

int main(int argc, char **argv) {
    EXPECT(argc == 4);
    KdaConfig config;
    EXPECT(strcmp(kda_last_error(), "") == 0);
    EXPECT(kda_config_kimi_k3(HEADS, NULL) == KDA_STATUS_NULL_POINTER);
    EXPECT(kda_config_kimi_k3(HEADS, &config) == KDA_STATUS_OK);
    EXPECT(config.heads == HEADS && config.lower_bound == -5.0f && config.conv_bias == 0);
    device_part(&config);

    KdaSources sources;
    memset(&sources, 0, sizeof sources);
    sources.bundle_path = argv[1];
    sources.cache_folder = "off";
    sources.no_nvrtc = 1;
    KdaPolicy policies[2] = {{0, 64, "split1-256x8-block"}, {2, 16, "split1-256x8-block"}};
    KdaPlan *plan = NULL;
    EXPECT(kda_plan_create("sm_90a", &config, policies, 2, &sources, &plan) == KDA_STATUS_OK);
    EXPECT(kda_plan_kernel_count(plan) == 2);
    for (size_t i = 0; i < 2; i++) {
        KdaKernelInfo info;
        const void *data;
        size_t bytes;
        EXPECT(kda_plan_kernel_info(plan, i, &info) == KDA_STATUS_OK);
        EXPECT(info.origin == KDA_ORIGIN_BUNDLE && strlen(info.key) == 64);
        EXPECT(kda_plan_cubin(plan, i, &data, &bytes) == KDA_STATUS_OK);
        EXPECT(bytes == 100 + i && ((const unsigned char *)data)[0] == i);
        printf("%s: %u x requests blocks of %u threads\n", info.entry, info.blocks_per_request,
               info.threads);
    }
    KdaKernelInfo info;
    EXPECT(kda_plan_kernel_info(plan, 2, &info) == KDA_STATUS_OUT_OF_RANGE);
    EXPECT(strcmp(kda_last_error(), "kernel 2 asked for, there are 2") == 0);
    EXPECT(kda_plan_kernel_info(plan, 0, NULL) == KDA_STATUS_NULL_POINTER);

    KdaStep step = valid_step();
    KdaLaunch launch;
    EXPECT(kda_plan_step(plan, &step, &launch) == KDA_STATUS_OK);
    printf("grid %u %u %u\n", launch.grid[0], launch.grid[1], launch.grid[2]);
    EXPECT(launch.kernel == 0 && launch.block[0] == 256 && launch.cluster[0] == 1);
    step.requests = 0;
    EXPECT(kda_plan_step(plan, &step, &launch) == KDA_STATUS_OK && launch.grid[0] == 0);
    step.requests = 65;
    EXPECT(kda_plan_step(plan, &step, &launch) == KDA_STATUS_NOT_PREPARED);
    step = valid_step();
    step.out.buffer.elements = 1;
    EXPECT(kda_plan_step(plan, &step, &launch) == KDA_STATUS_BAD_OPERAND);
    EXPECT(strcmp(kda_last_error(), "out holds 1 elements, 768 needed") == 0);
    EXPECT(kda_plan_step(plan, NULL, &launch) == KDA_STATUS_NULL_POINTER);
    /* A low-rank gate has no use for a projected one. */
    step = valid_step();
    step.gate_input = rows(12 * ((uint64_t)1 << 32), 3 * DIM, DIM);
    EXPECT(kda_plan_step(plan, &step, &launch) == KDA_STATUS_BAD_OPERAND);
    EXPECT(strcmp(kda_last_error(), "gate_input was given, but the configuration has a low-rank gate") == 0);
    kda_plan_destroy(plan);
    kda_plan_destroy(NULL);
    plan = NULL;

    /* A projected gate in place of F_A and F_B; its kernels are others. */
    KdaConfig projected = config;
    projected.gate_input = KDA_GATE_INPUT_PROJECTED;
    KdaPolicy decode = {0, 64, "split1-256x8-block"};
    EXPECT(kda_plan_create("sm_90a", &projected, policies, 2, &sources, &plan) == KDA_STATUS_NO_KERNEL);
    EXPECT(kda_plan_create("sm_90a", &projected, &decode, 1, &sources, &plan) == KDA_STATUS_OK);
    EXPECT(kda_plan_step(plan, &step, &launch) == KDA_STATUS_BAD_OPERAND);
    EXPECT(strcmp(kda_last_error(), "f_a was given, but the configuration has a projected gate") == 0);
    memset(&step.f_a, 0, sizeof step.f_a);
    EXPECT(kda_plan_step(plan, &step, &launch) == KDA_STATUS_BAD_OPERAND);
    EXPECT(strcmp(kda_last_error(), "f_b was given, but the configuration has a projected gate") == 0);
    memset(&step.f_b, 0, sizeof step.f_b);
    EXPECT(kda_plan_step(plan, &step, &launch) == KDA_STATUS_OK && launch.grid[1] == 3);
    step.gate_input.stride = DIM - 1;
    EXPECT(kda_plan_step(plan, &step, &launch) == KDA_STATUS_BAD_OPERAND);
    EXPECT(strcmp(kda_last_error(), "gate_input has a stride of 255 elements, 256 needed") == 0);
    memset(&step.gate_input, 0, sizeof step.gate_input);
    step.gate_input.stride = DIM;
    EXPECT(kda_plan_step(plan, &step, &launch) == KDA_STATUS_BAD_OPERAND);
    EXPECT(strcmp(kda_last_error(), "gate_input has address 0") == 0);
    kda_plan_destroy(plan);
    plan = NULL;
    decode.mode = "split4-128x8-cluster";
    EXPECT(kda_plan_create("sm_90a", &projected, &decode, 1, &sources, &plan) == KDA_STATUS_ILLEGAL_SETTING);
    EXPECT(strcmp(kda_last_error(), "gate_schedule is cluster, allowed: block with a projected gate") == 0);

    /* Settings that no kernel exists for. */
    KdaConfig odd = config;
    odd.gate = 2;
    EXPECT(kda_plan_create("sm_90a", &odd, policies, 2, &sources, &plan) == KDA_STATUS_ILLEGAL_SETTING);
    EXPECT(strcmp(kda_last_error(), "gate is 2, allowed: 0..=1") == 0);
    odd = config;
    odd.gate_input = 2;
    EXPECT(kda_plan_create("sm_90a", &odd, policies, 2, &sources, &plan) == KDA_STATUS_ILLEGAL_SETTING);
    EXPECT(strcmp(kda_last_error(), "gate_input is 2, allowed: 0..=1") == 0);
    odd = config;
    odd.heads = 0;
    EXPECT(kda_plan_create("sm_90a", &odd, NULL, 0, &sources, &plan) == KDA_STATUS_ILLEGAL_SETTING);
    EXPECT(kda_plan_create("sm_1", &config, NULL, 0, &sources, &plan) == KDA_STATUS_ILLEGAL_SETTING);
    EXPECT(kda_plan_create("sm\xff", &config, NULL, 0, &sources, &plan) == KDA_STATUS_BAD_TEXT);
    policies[0].mode = "split3";
    EXPECT(kda_plan_create("sm_90a", &config, policies, 2, &sources, &plan) == KDA_STATUS_ILLEGAL_SETTING);
    EXPECT(kda_plan_create("sm_90a", &config, NULL, 1, &sources, &plan) == KDA_STATUS_NULL_POINTER);

    /* Measured modes of a file serve policies that name none. A pointer to nothing is made. */
    char text[1000];
    const char *form = "device = \"GPU\"\narch = \"%s\"\ndate = \"2026-12-02\"\nentries = [\n"
                       "    { heads = 2, kind = \"decode\", tokens = 1, early_reads = \"weights\", "
                       "max_requests = 65535, mode = \"%s\", microseconds = 5.5 },\n]\n";
    KdaPolicy measured = {0, 0, NULL};
    snprintf(text, sizeof text, form, "sm_90a", "split1-256x8-block");
    sources.policy_text = text;
    EXPECT(kda_plan_create("sm_90a", &config, &measured, 1, &sources, &plan) == KDA_STATUS_OK);
    EXPECT(kda_plan_kernel_count(plan) == 1);
    kda_plan_destroy(plan);
    EXPECT(kda_plan_create("sm_90a", &config, NULL, 0, &sources, &plan) == KDA_STATUS_OK);
    kda_plan_destroy(plan);
    plan = NULL;
    EXPECT(kda_plan_create("sm_100a", &config, &measured, 1, &sources, &plan) == KDA_STATUS_ILLEGAL_SETTING);
    EXPECT(strcmp(kda_last_error(), "the policy file of GPU is for sm_90a, kernels are for sm_100a") == 0);
    sources.policy_path = argv[3];
    EXPECT(kda_plan_create("sm_90a", &config, &measured, 1, &sources, &plan) == KDA_STATUS_ILLEGAL_SETTING);
    EXPECT(strcmp(kda_last_error(), "policy_text was given beside policy_path") == 0);
    sources.policy_text = NULL;
    FILE *file = fopen(argv[3], "w");
    EXPECT(file != NULL && fputs(text, file) >= 0 && fclose(file) == 0);
    EXPECT(kda_plan_create("sm_90a", &config, &measured, 1, &sources, &plan) == KDA_STATUS_OK);
    kda_plan_destroy(plan);
    plan = NULL;
    sources.policy_path = "/nonexistent/policies.toml";
    EXPECT(kda_plan_create("sm_90a", &config, &measured, 1, &sources, &plan) == KDA_STATUS_ILLEGAL_SETTING);
    EXPECT(strstr(kda_last_error(), "/nonexistent/policies.toml") != NULL);
    sources.policy_path = NULL;
    snprintf(text, sizeof text, form, "sm_90a", "split3");
    sources.policy_text = text;
    EXPECT(kda_plan_create("sm_90a", &config, policies, 2, &sources, &plan) == KDA_STATUS_ILLEGAL_SETTING);
    EXPECT(strstr(kda_last_error(), "is no policy file: ") != NULL);
    sources.policy_text = "\xff";
    EXPECT(kda_plan_create("sm_90a", &config, &measured, 1, &sources, &plan) == KDA_STATUS_BAD_TEXT);
    EXPECT(strcmp(kda_last_error(), "policy_text is no UTF-8") == 0);
    sources.policy_text = NULL;
    EXPECT(plan == NULL);

    /* The bundle does not hold the default policies' kernels; the cache is empty. */
    sources.cache_folder = argv[2];
    EXPECT(kda_plan_create("sm_90a", &config, NULL, 0, &sources, &plan) == KDA_STATUS_NO_KERNEL);
    sources.bundle_path = "/nonexistent/bundle";
    EXPECT(kda_plan_create("sm_90a", &config, NULL, 0, &sources, &plan) == KDA_STATUS_BAD_BUNDLE);
    sources.bundle_path = NULL;
    sources.bundle_data = "KDAKERN1";
    sources.bundle_bytes = 8;
    EXPECT(kda_plan_create("sm_90a", &config, NULL, 0, &sources, &plan) == KDA_STATUS_BAD_BUNDLE);
    EXPECT(plan == NULL);
    puts("done");
    return 0;
}
