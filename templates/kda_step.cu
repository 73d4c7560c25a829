// One KDA step: a cluster of VALUE_SPLIT blocks serves one (request, head). Grid: x = heads times
// VALUE_SPLIT, y = requests.
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) KDA_CLUSTER KDA_ENTRY(KDA_PARAMETERS) {
    __shared__ Shared shared;
    const int rank = blockIdx.x % VALUE_SPLIT;
    const Pair pair = own_pair();
    const int head = pair.head;
    const int request = pair.request;
    const int lane = threadIdx.x % 32;
    const i64 first_row = (i64)request * TOKENS;

    if constexpr (VALUE_SPLIT > 1) {
        if (threadIdx.x == 0) {
            if constexpr (SHARED_GATE) barrier_expect(shared_address(&shared.gate_barrier), TOKENS * HEAD_DIM * 4);
            barrier_expect(shared_address(&shared.norm_barrier), TOKENS * NORM_PARTIALS * 4);
            barrier_init_fence();
        }
        __syncwarp();
        cluster_arrive();
    }

    // Weights: nobody writes them while the model runs, so they are read ahead of the dependency.
    GateWeights gate_weights;
    load_gate_weights(gate_weights, f_b, a_log, dt_bias, head, rank);
    ConvWeights conv_weights;
    load_conv_weights(conv_weights, conv_weight, conv_bias, head, rank);
    const float norm_weight = load_weight(norm + rank * ROWS + own_row());

    PinnedInputs pinned;
    if constexpr (PINNED) {
        // A uniform slot would be waited for at once, see load_slots.
        pinned.slot = pin(slots + (i64)request * geometry.slots_stride + threadIdx.y);
        pinned.f_a = pin(f_a + first_row * geometry.f_a_pitch + threadIdx.x % GATE_RANK);
        pinned.beta = pin(beta + first_row * geometry.beta_pitch + head);
        pinned.output_gate = pin(output_gate + first_row * geometry.gate_pitch + head * HEAD_DIM + rank * ROWS + own_row());
        pinned.source = pin(state_source + row_offset(head, rank, group_row(0)));
#pragma unroll
        for (int pass = 0; pass < CONV_PASSES; ++pass) {
            ConvChannel c = conv_channel(pass * THREADS + threadIdx.x, rank);
            int column = c.part * DIM + head * HEAD_DIM + c.in_head;
            pinned.raw[pass] = pin(qkv + first_row * geometry.qkv_pitch + column);
            pinned.line[pass] = pin(conv_cache + conv_offset(column, 0, geometry));
        }
    }

    auto own_vectors = [&](int slot) {
        const i64 offset = slot * geometry.source_slot_stride;
        if constexpr (PINNED) return VectorsByDistance{pinned.source + offset};
        else return VectorsByRow{state_source + offset, head, rank};
    };

    if (SLOT_HINTS && !EARLY_CACHES && pair.number < first_wave()) {
        // Hints only: the values may be stale, so they are range-checked and then forgotten. Blocks of
        // later waves start when the launch before is long over; they would only wait twice.
        const int* row = slots + (i64)request * geometry.slots_stride;
        const HintedSlots hinted = load_hinted_slots(PINNED ? pinned.slot : row, accepted + request, lane, geometry);
        if (in_pool(hinted.window, geometry)) {
            if (!VERIFY || RECORDS || in_pool(hinted.source, geometry)) prefetch_state(own_vectors(hinted.source));
            const i64 line = hinted.window * geometry.conv_slot_stride;
            if constexpr (PINNED) {
#pragma unroll
                for (int pass = 0; pass < CONV_PASSES; ++pass) prefetch_l2(pinned.line[pass] + line);
            } else if constexpr (HINTED_WINDOW) {
                prefetch_window(conv_cache + line, hinted.start, head, rank, geometry);
            }
            if constexpr (HINTED_RECORDS)
                prefetch_records(records + hinted.window * geometry.record_slot_stride, hinted.start, head, rank);
        }
    }

    // The barriers of every block are initialised before any block stores into another.
    if constexpr (VALUE_SPLIT > 1) cluster_wait();
    if constexpr (!EARLY_CACHES) dependency_wait();
    const int* slot_row = slots + (i64)request * geometry.slots_stride;
    SlotValues slot_values;
    if constexpr (PINNED) slot_values = {load_int(pinned.slot), 1, TOKENS};
    else slot_values = load_slots(slot_row, accepted + request, token_counts + request, lane, geometry);

    GateInputs gate_inputs;
    ConvInputs conv_inputs;
    bf16_bits output_gate_bits[OUTPUT_TOKENS];
    bf16_bits beta_bits;  // lane t holds token t's
    auto load_chunk = [&](int first) {
        const i64 pitch = PROJECTED_GATE ? geometry.gate_input_pitch : geometry.f_a_pitch;
        const bf16_bits* rows = PROJECTED_GATE ? gate_input + head * HEAD_DIM : f_a;
        load_gate_inputs(gate_inputs, rows + first_row * pitch, first, pitch);
        load_raw(conv_inputs, qkv + first_row * geometry.qkv_pitch, first, head, rank, geometry.qkv_pitch);
    };
    auto load_gates = [&]() {
        beta_bits = load_input(beta + (first_row + min(lane, TOKENS - 1)) * geometry.beta_pitch + head);
#pragma unroll
        for (int n = 0; n < OUTPUT_TOKENS; ++n) {
            int t = min(n * ROW_COPIES + lane % ROW_COPIES, TOKENS - 1);
            output_gate_bits[n] = load_input(output_gate + (first_row + t) * geometry.gate_pitch +
                                            head * HEAD_DIM + rank * ROWS + own_row());
        }
    };
    auto load_projected = [&]() {
        if constexpr (PINNED) {
#pragma unroll
            for (int pass = 0; pass < INPUT_PASSES; ++pass) gate_inputs.bits[pass] = load_input(pinned.f_a + pass * THREADS);
#pragma unroll
            for (int pass = 0; pass < CONV_PASSES; ++pass) conv_inputs.raw[pass][0] = load_input(pinned.raw[pass]);
            beta_bits = load_input(pinned.beta);
            output_gate_bits[0] = load_input(pinned.output_gate);
            return;
        }
        load_chunk(0);
        if constexpr (!LATE_GATES) load_gates();
    };
    if constexpr (!EARLY_CACHES) load_projected();
    const RequestSlots own = resolve_slots(slot_values, slot_row, lane, geometry);

    bf16_bits* out_row = out + head * HEAD_DIM + rank * ROWS + own_row();
    if (!own.live) {
        if constexpr (EARLY_CACHES) dependency_wait();
#pragma unroll
        for (int n = 0; n < OUTPUT_TOKENS; ++n) {
            int t = n * ROW_COPIES + lane % ROW_COPIES;
            if (t < own.tokens) store_bits(out_row + (first_row + t) * geometry.out_stride, 0);
        }
        if (own.fault != FAULT_NONE && reports(head) && threadIdx.x == 0) report_fault(faults, request, own.fault);
        return;
    }

    bf16_bits* line = conv_cache + own.window * geometry.conv_slot_stride;
    float* own_records = records + own.window * geometry.record_slot_stride;
    if constexpr (RECORDS) stage_records(shared, own_records, 0, own.window_start, head, rank);
    if constexpr (PINNED) load_pinned_window(conv_inputs, pinned, own.window, geometry);
    else load_window(conv_inputs, line, own.window_start, head, rank, geometry);
    RowState state;
    const auto source = own_vectors(own.source);
    if constexpr (PREFETCHED_STATE) {
        if (pair.number < first_wave()) prefetch_state(source);
    }
    if constexpr (!LATE_STATE) load_state(state, source);
    if constexpr (EARLY_CACHES) {
        dependency_wait();
        load_projected();
    }

#pragma unroll 1
    for (int first = 0; first < TOKENS; first += CHUNK) {
        // A cluster's exchange counts the gates of all tokens.
        if (RAGGED && !SHARED_GATE && first >= own.tokens) break;
        if (first > 0) load_chunk(first);
        if constexpr (STAGED_INPUT) {
            stage_gate_inputs(shared, gate_inputs, first);
            // F_A of the chunk is in shared memory.
            __syncthreads();
        }
        if constexpr (PROJECTED_GATE) compute_projected_gates(shared, gate_weights, gate_inputs, first, lower_bound);
        else compute_gates(shared, gate_weights, gate_inputs, first, lower_bound, rank);
        convolve(shared, conv_inputs, conv_weights, first, own.tokens, line, head, rank, geometry);
    }
    if constexpr (LATE_GATES) load_gates();
    if constexpr (LATE_STATE) load_state(state, source);
    const float own_beta = sigmoid_fast(widen(beta_bits));
    float output_factor[OUTPUT_TOKENS];
#pragma unroll
    for (int n = 0; n < OUTPUT_TOKENS; ++n)
        output_factor[n] = __fmul_rn(norm_weight, sigmoid_fast(widen(output_gate_bits[n])));

    // q, k, v, old records and (unless the cluster shares them) the gates are in shared memory.
    if constexpr (RECORDS) wait_copies();
    __syncthreads();
    if constexpr (TOKENS > 1) {
        normalise_tokens(shared, own.tokens, scale);
        __syncthreads();
    }
    if constexpr (SHARED_GATE && TOKENS > 1) barrier_wait(shared_address(&shared.gate_barrier), 0);
    if constexpr (RECORDS) {
        repeat_records(state, shared, 0, own.window_start);
#pragma unroll 1
        for (int first = RECORD_CHUNK; first < own.window_start; first += RECORD_CHUNK) {
            __syncthreads();
            stage_records(shared, own_records, first, own.window_start, head, rank);
            wait_copies();
            __syncthreads();
            repeat_records(state, shared, first, own.window_start);
        }
    }

    float single_output = 0.0f;
#pragma unroll(UNROLLED_TOKENS)
    for (int t = 0; t < TOKENS; ++t) {
        if (RAGGED && t >= own.tokens) {
            // The cluster's exchange counts the sums of all tokens.
            send_partial(shared, t, 0.0f, rank);
            continue;
        }
        float beta = TOKENS == 1 ? own_beta : __shfl_sync(FULL_WARP, own_beta, t);
        TokenResult result = delta_rule(state, shared, t, beta, shared.v(t)[own_row()], scale);
        send_partial(shared, t, group_square(result.output), rank);
        int checkpoint = TOKENS == 1 || RECORDS ? own.window : __shfl_sync(FULL_WARP, own.own, t);
        bool kept = RECORDS ? t == 0 : !is_null(checkpoint);
        store_state(state, state_pool + checkpoint * geometry.state_slot_stride, head, rank, kept);
        if (RECORDS && t > 0) store_record_update(own_records, t, result.update, head, rank);
        if constexpr (TOKENS == 1) {
            single_output = result.output;
        } else {
            // Every copy of the row has read v; its place now keeps the output.
            __syncwarp();
            if (lane % ROW_COPIES == 0) shared.v(t)[own_row()] = result.output;
        }
    }

    // All partial sums of the cluster are here, and with them every block has read its window.
    if constexpr (VALUE_SPLIT == 1) __syncthreads();
    if constexpr (VALUE_SPLIT > 1) barrier_wait(shared_address(&shared.norm_barrier), 0);
    __syncwarp();
    const float single_factor = TOKENS == 1 ? inverse_norm_by_lanes(shared.partial[0], eps) : 0.0f;
#pragma unroll
    for (int n = 0; n < OUTPUT_TOKENS; ++n) {
        int t = n * ROW_COPIES + lane % ROW_COPIES;
        if (t < own.tokens) {
            float factor = TOKENS == 1 ? single_factor : inverse_norm(shared.partial[t], eps);
            float value = __fmul_rn(TOKENS == 1 ? single_output : shared.v(t)[own_row()], factor);
            store_bits(out_row + (first_row + t) * geometry.out_stride, round_bf16(__fmul_rn(value, output_factor[n])));
        }
    }
    if constexpr (LATE_LINE)
        store_line(conv_inputs, qkv + first_row * geometry.qkv_pitch, geometry.qkv_pitch, line,
                   own.window_start, own.tokens, head, rank, geometry);
    if constexpr (RECORDS && TOKENS > 1) store_record_keys(shared, own_records, own.tokens, head, rank);
}
