/* C interface of the fused KDA decode and verify step. Generated from crates/capi/src/lib.rs. */

#ifndef PREPARED_KDA_H
#define PREPARED_KDA_H

#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

/**
 * Result of a call.
 */
enum KdaStatus
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  /**
   * Done.
   */
  KDA_STATUS_OK = 0,
  /**
   * A required pointer is NULL.
   */
  KDA_STATUS_NULL_POINTER = 1,
  /**
   * A setting, a mode or an enumeration has no legal value.
   */
  KDA_STATUS_ILLEGAL_SETTING = 2,
  /**
   * An operand is missing, too short, too narrow, misaligned, too large or overlaps another.
   */
  KDA_STATUS_BAD_OPERAND = 3,
  /**
   * No kernel was prepared for the step.
   */
  KDA_STATUS_NOT_PREPARED = 4,
  /**
   * A bundle is damaged, unreadable or does not match.
   */
  KDA_STATUS_BAD_BUNDLE = 5,
  /**
   * No source has a kernel, NVRTC is missing or unusable, or a kernel does not compile.
   */
  KDA_STATUS_NO_KERNEL = 6,
  /**
   * The CUDA driver is missing.
   */
  KDA_STATUS_NO_DRIVER = 7,
  /**
   * No kernel exists for the device.
   */
  KDA_STATUS_DEVICE_UNSUPPORTED = 8,
  /**
   * A CUDA call failed.
   */
  KDA_STATUS_CUDA = 9,
  /**
   * The stream is being captured.
   */
  KDA_STATUS_CAPTURING = 10,
  /**
   * An index is past the end.
   */
  KDA_STATUS_OUT_OF_RANGE = 11,
  /**
   * A text is no UTF-8.
   */
  KDA_STATUS_BAD_TEXT = 12,
  /**
   * A bug in this library; the process may go on.
   */
  KDA_STATUS_PANIC = 13,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum KdaStatus KdaStatus;
#else
typedef uint32_t KdaStatus;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

/**
 * Order inside a conv cache slot.
 */
enum KdaConvLayout
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  /**
   * `[3 dim, length]`.
   */
  KDA_CONV_LAYOUT_DIM_FIRST = 0,
  /**
   * `[length, 3 dim]`.
   */
  KDA_CONV_LAYOUT_TOKEN_FIRST = 1,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum KdaConvLayout KdaConvLayout;
#else
typedef uint32_t KdaConvLayout;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

/**
 * Decay formula.
 */
enum KdaGate
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  /**
   * exp(bound * sigmoid(exp(A_log) * (g + dt_bias))).
   */
  KDA_GATE_LOWER_BOUND = 0,
  /**
   * exp(-exp(A_log) * softplus(g + dt_bias)).
   */
  KDA_GATE_SOFTPLUS = 1,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum KdaGate KdaGate;
#else
typedef uint32_t KdaGate;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

/**
 * What the gate's input comes from.
 */
enum KdaGateInput
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  /**
   * F_B * F_A, computed by the launch in float.
   */
  KDA_GATE_INPUT_LOW_RANK = 0,
  /**
   * An operand: the caller's own F_B * F_A, rounded to bf16.
   */
  KDA_GATE_INPUT_PROJECTED = 1,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum KdaGateInput KdaGateInput;
#else
typedef uint32_t KdaGateInput;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

/**
 * Null slot values.
 */
enum KdaNullRule
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  /**
   * 0 and below.
   */
  KDA_NULL_RULE_NON_POSITIVE = 0,
  /**
   * Below 0.
   */
  KDA_NULL_RULE_NEGATIVE = 1,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum KdaNullRule KdaNullRule;
#else
typedef uint32_t KdaNullRule;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

/**
 * Element type of the state pool.
 */
enum KdaStateDtype
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  /**
   * float.
   */
  KDA_STATE_DTYPE_F32 = 0,
  /**
   * bfloat16.
   */
  KDA_STATE_DTYPE_BF16 = 1,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum KdaStateDtype KdaStateDtype;
#else
typedef uint32_t KdaStateDtype;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

/**
 * What a verify step keeps, for every number of its tokens that may be accepted.
 */
enum KdaRollback
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  /**
   * A state after every token, each in a slot of its own.
   */
  KDA_ROLLBACK_CHECKPOINTS = 0,
  /**
   * The state after the first token, and a record of each later one.
   */
  KDA_ROLLBACK_RECORDS = 1,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum KdaRollback KdaRollback;
#else
typedef uint32_t KdaRollback;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

/**
 * What may be read before the kernel ahead in the stream has finished.
 */
enum KdaEarlyReads
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  /**
   * Weights only.
   */
  KDA_EARLY_READS_WEIGHTS = 0,
  /**
   * Also conv cache, state, records, slots, accepted and token counts, which the kernel ahead must
   * not write.
   */
  KDA_EARLY_READS_CACHES = 1,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum KdaEarlyReads KdaEarlyReads;
#else
typedef uint32_t KdaEarlyReads;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

/**
 * Where a kernel came from.
 */
enum KdaOrigin
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  /**
   * The bundle.
   */
  KDA_ORIGIN_BUNDLE = 0,
  /**
   * The disk cache.
   */
  KDA_ORIGIN_CACHE = 1,
  /**
   * NVRTC.
   */
  KDA_ORIGIN_COMPILED = 2,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum KdaOrigin KdaOrigin;
#else
typedef uint32_t KdaOrigin;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

/**
 * Why a request was refused.
 */
enum KdaFaultKind
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  /**
   * None was.
   */
  KDA_FAULT_KIND_NONE = 0,
  /**
   * A slot is not below the pools' slot count.
   */
  KDA_FAULT_KIND_SLOT_OUT_OF_RANGE = 1,
  /**
   * An accepted count is outside 1..=columns, or outside 1..=records + 1.
   */
  KDA_FAULT_KIND_ACCEPTED_OUT_OF_RANGE = 2,
  /**
   * The source slot of a live request is null.
   */
  KDA_FAULT_KIND_NULL_SOURCE = 3,
  /**
   * A token count is outside 0..=tokens.
   */
  KDA_FAULT_KIND_TOKENS_OUT_OF_RANGE = 4,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum KdaFaultKind KdaFaultKind;
#else
typedef uint32_t KdaFaultKind;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

/**
 * A CUDA context to prepare and launch in.
 */
typedef struct KdaDevice KdaDevice;

/**
 * Kernels and checks without a device.
 */
typedef struct KdaPlan KdaPlan;

/**
 * Kernels of one model on one device.
 */
typedef struct KdaPrepared KdaPrepared;

/**
 * The kernel that zeroes slots of one model on one device.
 */
typedef struct KdaPreparedReset KdaPreparedReset;

/**
 * A model's KDA layers on one device. Every field matters; `kda_config_kimi_k3` fills all.
 */
typedef struct KdaConfig {
  /**
   * Heads on this device, 1..=128.
   */
  size_t heads;
  /**
   * Whether the convolution has a bias: 0 or 1.
   */
  uint32_t conv_bias;
  /**
   * A KdaConvLayout.
   */
  uint32_t conv_layout;
  /**
   * A KdaGate.
   */
  uint32_t gate;
  /**
   * Lower bound of the log decay, below 0; unread with the softplus gate.
   */
  float lower_bound;
  /**
   * A KdaGateInput.
   */
  uint32_t gate_input;
  /**
   * A KdaNullRule.
   */
  uint32_t null_rule;
  /**
   * A KdaStateDtype.
   */
  uint32_t state_dtype;
  /**
   * A KdaRollback.
   */
  uint32_t rollback;
  /**
   * Whether verify steps take a number of tokens for each request: 0 or 1.
   */
  uint32_t ragged;
  /**
   * A KdaEarlyReads.
   */
  uint32_t early_reads;
  /**
   * Factor of the normalised query.
   */
  float scale;
  /**
   * Added to the mean square of the output norm.
   */
  float eps;
} KdaConfig;

/**
 * One rule: steps of this kind with up to `max_requests` requests run in `mode`. Of several that cover a
 * step the one with the fewest requests serves it; their order does not matter.
 */
typedef struct KdaPolicy {
  /**
   * Tokens a request brings: 0 is a decode step, 1..=16 a verify step of so many.
   */
  size_t verify_tokens;
  /**
   * Largest number of requests, from 1.
   */
  size_t max_requests;
  /**
   * A schedule, for example `split8-128x8-cluster`; NULL: the measured choice, of the policy file
   * in KdaSources or for the device, with `max_requests` unread.
   */
  const char *mode;
} KdaPolicy;

/**
 * Where kernels come from, in this order, and measured modes. All zeros: the user's disk cache, then
 * NVRTC; the modes measured on the device.
 */
typedef struct KdaSources {
  /**
   * A bundle's file, or NULL.
   */
  const char *bundle_path;
  /**
   * A bundle in memory, or NULL; copied.
   */
  const void *bundle_data;
  /**
   * Its length in bytes.
   */
  size_t bundle_bytes;
  /**
   * The disk cache's folder; NULL: the user's; `off`: none.
   */
  const char *cache_folder;
  /**
   * A folder to look for libnvrtc in first, or NULL.
   */
  const char *nvrtc_folder;
  /**
   * 1: nothing is compiled.
   */
  uint32_t no_nvrtc;
  /**
   * A policy file of the device's architecture, or NULL: its modes serve the policies that name
   * none. A reset reads neither this nor the text.
   */
  const char *policy_path;
  /**
   * The text of a policy file in place of its path, or NULL.
   */
  const char *policy_text;
} KdaSources;

/**
 * Device memory: an address and the elements from there on that belong to the operand.
 */
typedef struct KdaBuffer {
  /**
   * Device address; 0: absent.
   */
  uint64_t address;
  /**
   * Elements.
   */
  size_t elements;
} KdaBuffer;

/**
 * Rows at a distance.
 */
typedef struct KdaRows {
  /**
   * The memory.
   */
  struct KdaBuffer buffer;
  /**
   * Elements between rows.
   */
  int64_t stride;
} KdaRows;

/**
 * Everything one launch reads and writes. Shapes and dtypes are those of `kda_runtime::Step`.
 */
typedef struct KdaStep {
  /**
   * 0 is a decode step, 1..=16 a verify step of so many tokens. After a verify step of which more
   * than one token was accepted comes a verify step, never a decode step.
   */
  size_t verify_tokens;
  /**
   * Requests; 0 launches nothing.
   */
  size_t requests;
  /**
   * bf16 `[rows, 3 dim]`.
   */
  struct KdaRows qkv;
  /**
   * bf16 `[rows, dim]`.
   */
  struct KdaRows output_gate;
  /**
   * bf16 `[rows, 128]`, with the low-rank gate.
   */
  struct KdaRows f_a;
  /**
   * bf16 `[rows, dim]`, with a projected gate: F_B * F_A, before dt_bias.
   */
  struct KdaRows gate_input;
  /**
   * bf16 `[rows, heads]`.
   */
  struct KdaRows beta;
  /**
   * f32 `[3, 4, dim]`.
   */
  struct KdaBuffer conv_weight;
  /**
   * f32 `[3 dim]`, with a conv bias.
   */
  struct KdaBuffer conv_bias;
  /**
   * bf16 `[dim, 128]`, 16-byte aligned, with the low-rank gate.
   */
  struct KdaBuffer f_b;
  /**
   * f32 `[heads]`.
   */
  struct KdaBuffer a_log;
  /**
   * f32 `[dim]`.
   */
  struct KdaBuffer dt_bias;
  /**
   * f32 `[128]`.
   */
  struct KdaBuffer norm;
  /**
   * bf16, updated in place; the stride is between slots.
   */
  struct KdaRows conv_cache;
  /**
   * Positions of a conv line.
   */
  size_t conv_length;
  /**
   * `[slots, heads, 128 values, 128 keys]`, written; the stride is between slots.
   */
  struct KdaRows state;
  /**
   * Read instead of `state`; address 0: `state` is updated in place.
   */
  struct KdaRows state_source;
  /**
   * Slots of the pools.
   */
  size_t pool_slots;
  /**
   * i32 `[requests, columns]`; the stride is between rows.
   */
  struct KdaRows slots;
  /**
   * Columns of the slot table; with records only the first is read.
   */
  size_t slot_columns;
  /**
   * i32 `[requests]`, for verify steps.
   */
  struct KdaBuffer accepted;
  /**
   * i32 `[requests]`, for ragged verify steps: rows that each request brings, 0 to the step's
   * tokens. With 0 nothing of the request is touched: its state stays in `state_source`.
   */
  struct KdaBuffer token_counts;
  /**
   * f32 `[slots, record_count, heads, 3, 128]`, 16-byte aligned, updated in place, for verify steps
   * that keep records; the stride is between slots, a multiple of 4.
   */
  struct KdaRows records;
  /**
   * Records of a slot; 0 without.
   */
  size_t record_count;
  /**
   * bf16 `[rows, dim]`, written.
   */
  struct KdaRows out;
} KdaStep;

/**
 * What the device refused since the last look.
 */
typedef struct KdaFaults {
  /**
   * Refused requests; 0: none, and the rest is 0 too.
   */
  uint32_t count;
  /**
   * Lowest index in its batch among them.
   */
  uint32_t request;
  /**
   * A KdaFaultKind.
   */
  uint32_t kind;
} KdaFaults;

/**
 * What is known of one kernel. Texts belong to the handle and live as long as it.
 */
typedef struct KdaKernelInfo {
  /**
   * Entry point.
   */
  const char *entry;
  /**
   * Digest of everything its code depends on, 64 hexadecimal digits.
   */
  const char *key;
  /**
   * A KdaOrigin.
   */
  uint32_t origin;
  /**
   * Registers of a thread; 0: unknown.
   */
  uint32_t registers;
  /**
   * Static shared memory of a block in bytes; 0: unknown.
   */
  uint32_t shared_bytes;
  /**
   * Blocks for one request; the grid is this by the number of requests.
   */
  uint32_t blocks_per_request;
  /**
   * Threads of a block.
   */
  uint32_t threads;
  /**
   * Blocks of a cluster.
   */
  uint32_t cluster;
} KdaKernelInfo;

/**
 * The operands of one reset: `kda_runtime::Reset`.
 */
typedef struct KdaReset {
  /**
   * Rows of the slot table; 0 launches nothing.
   */
  size_t requests;
  /**
   * i32 `[requests, columns]`: the slots to zero; the stride is between rows. Null values and those
   * not below `pool_slots` are skipped, others are distinct.
   */
  struct KdaRows slots;
  /**
   * Columns of the slot table.
   */
  size_t slot_columns;
  /**
   * bf16, written; the stride is between slots.
   */
  struct KdaRows conv_cache;
  /**
   * Positions of a conv line, at least 3.
   */
  size_t conv_length;
  /**
   * `[slots, heads, 128 values, 128 keys]`, written; the stride is between slots.
   */
  struct KdaRows state;
  /**
   * Slots of the pools.
   */
  size_t pool_slots;
} KdaReset;

/**
 * The dimensions of a launch.
 */
typedef struct KdaLaunch {
  /**
   * Index of its kernel.
   */
  size_t kernel;
  /**
   * Blocks; all 0 for a step without requests.
   */
  uint32_t grid[3];
  /**
   * Threads of a block.
   */
  uint32_t block[3];
  /**
   * Blocks of a cluster.
   */
  uint32_t cluster[3];
} KdaLaunch;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/**
 * The text of the calling thread's last failure; valid until its next failure. Never NULL.
 */
const char *kda_last_error(void);

/**
 * Fills `config` with Kimi K3's settings.
 *
 * # Safety
 *
 * `config` is NULL or points to a KdaConfig.
 */
KdaStatus kda_config_kimi_k3(size_t heads, struct KdaConfig *config);

/**
 * Retains the primary context of a device.
 *
 * # Safety
 *
 * `device` is NULL or points to room for a pointer.
 */
KdaStatus kda_device_primary(int32_t ordinal, struct KdaDevice **device);

/**
 * Uses a context (a CUcontext) that the caller keeps.
 *
 * # Safety
 *
 * `context` is a live context and stays one until the device and everything prepared on it are
 * destroyed; `device` is NULL or points to room for a pointer.
 */
KdaStatus kda_device_borrow(void *context, struct KdaDevice **device);

/**
 * Destroys a device; what is prepared on it stays usable. NULL is ignored.
 *
 * # Safety
 *
 * `device` is NULL or was made by this library and not destroyed yet.
 */
void kda_device_destroy(struct KdaDevice *device);

/**
 * Gets and loads the kernels of `count` policies; NULL and 0: decode steps, the measured choice.
 * `sources` may be NULL. `stream` (a CUstream) is only asked whether it is being captured.
 *
 * # Safety
 *
 * Pointers are NULL or valid, with valid texts; `stream` is a stream of the device's context.
 */
KdaStatus kda_prepare(const struct KdaDevice *device,
                      void *stream,
                      const struct KdaConfig *config,
                      const struct KdaPolicy *policies,
                      size_t count,
                      const struct KdaSources *sources,
                      struct KdaPrepared **prepared);

/**
 * Launches one step on `stream`: one kernel, nothing allocated, capturable.
 *
 * # Safety
 *
 * Pointers are NULL or valid. Every buffer of the step is device memory of the prepared object's
 * context with the stated elements, alive until the launch has finished; nothing else writes what
 * it reads or touches what it writes meanwhile; live slots are distinct; `stream` belongs to the
 * context.
 */
KdaStatus kda_run(const struct KdaPrepared *prepared, void *stream, const struct KdaStep *step);

/**
 * Waits for `stream`, reads what was refused, and forgets it.
 *
 * # Safety
 *
 * Pointers are NULL or valid; `stream` belongs to the context.
 */
KdaStatus kda_take_faults(const struct KdaPrepared *prepared,
                          void *stream,
                          struct KdaFaults *faults);

/**
 * Reads what was refused so far, without waiting.
 *
 * # Safety
 *
 * Pointers are NULL or valid.
 */
KdaStatus kda_peek_faults(const struct KdaPrepared *prepared, struct KdaFaults *faults);

/**
 * Number of prepared kernels; 0 for NULL.
 *
 * # Safety
 *
 * `prepared` is NULL or valid.
 */
size_t kda_kernel_count(const struct KdaPrepared *prepared);

/**
 * Describes prepared kernel `index`.
 *
 * # Safety
 *
 * Pointers are NULL or valid.
 */
KdaStatus kda_kernel_info(const struct KdaPrepared *prepared,
                          size_t index,
                          struct KdaKernelInfo *info);

/**
 * Destroys a prepared object; its launches must have finished. NULL is ignored.
 *
 * # Safety
 *
 * `prepared` is NULL or was made by this library and not destroyed yet.
 */
void kda_prepared_destroy(struct KdaPrepared *prepared);

/**
 * Gets and loads the kernel that zeroes the state and conv line of slots, for requests that reuse
 * them. `sources` may be NULL. `stream` is only asked whether it is being captured.
 *
 * # Safety
 *
 * Pointers are NULL or valid, with valid texts; `stream` is a stream of the device's context.
 */
KdaStatus kda_reset_prepare(const struct KdaDevice *device,
                            void *stream,
                            const struct KdaConfig *config,
                            const struct KdaSources *sources,
                            struct KdaPreparedReset **reset);

/**
 * Launches one reset on `stream`: one kernel, nothing allocated, capturable.
 *
 * # Safety
 *
 * Pointers are NULL or valid. Every buffer is device memory of the context with the stated elements,
 * alive until the launch has finished; nothing else touches the slots meanwhile; slots that are
 * neither null nor out of range are distinct; `stream` belongs to the context.
 */
KdaStatus kda_reset_run(const struct KdaPreparedReset *reset,
                        void *stream,
                        const struct KdaReset *operands);

/**
 * Destroys a prepared reset; its launches must have finished. NULL is ignored.
 *
 * # Safety
 *
 * `reset` is NULL or was made by this library and not destroyed yet.
 */
void kda_reset_destroy(struct KdaPreparedReset *reset);

/**
 * Gets kernels for `arch`, for example `sm_90a`, without a device. `sources` may be NULL.
 *
 * # Safety
 *
 * Pointers are NULL or valid, with valid texts.
 */
KdaStatus kda_plan_create(const char *arch,
                          const struct KdaConfig *config,
                          const struct KdaPolicy *policies,
                          size_t count,
                          const struct KdaSources *sources,
                          struct KdaPlan **plan);

/**
 * Checks a step as `kda_run` does and describes its launch.
 *
 * # Safety
 *
 * Pointers are NULL or valid; the step's addresses are not used.
 */
KdaStatus kda_plan_step(const struct KdaPlan *plan,
                        const struct KdaStep *step,
                        struct KdaLaunch *launch);

/**
 * Number of a plan's kernels; 0 for NULL.
 *
 * # Safety
 *
 * `plan` is NULL or valid.
 */
size_t kda_plan_kernel_count(const struct KdaPlan *plan);

/**
 * Describes kernel `index` of a plan.
 *
 * # Safety
 *
 * Pointers are NULL or valid.
 */
KdaStatus kda_plan_kernel_info(const struct KdaPlan *plan,
                               size_t index,
                               struct KdaKernelInfo *info);

/**
 * The device code of kernel `index` of a plan, owned by the plan.
 *
 * # Safety
 *
 * Pointers are NULL or valid.
 */
KdaStatus kda_plan_cubin(const struct KdaPlan *plan,
                         size_t index,
                         const void **data,
                         size_t *bytes);

/**
 * Destroys a plan. NULL is ignored.
 *
 * # Safety
 *
 * `plan` is NULL or was made by this library and not destroyed yet.
 */
void kda_plan_destroy(struct KdaPlan *plan);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* PREPARED_KDA_H */
