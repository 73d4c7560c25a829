// Zeroes the state and the conv line of slots, so that a new request starts from nothing. One block
// for a head of a slot. Grid: x = head, y = request, z = column of the slot table.
extern "C" __global__ void __launch_bounds__(THREADS) KDA_ENTRY(KDA_PARAMETERS) {
    // The launch before may have written the table, or may still work on the slots.
    dependency_wait();
    const int slot = slots[(i64)blockIdx.y * geometry.slots_stride + blockIdx.z];
    const bool null = NULL_NON_POSITIVE ? slot <= 0 : slot < 0;
    if (null || slot >= geometry.pool_slots) return;

    // A slot starts at a multiple of 16 bytes, and so does a head's matrix in it.
    constexpr int VECTORS = MATRIX * (int)sizeof(state_element) / 16;
    uint4* matrix = reinterpret_cast<uint4*>(state_pool + slot * geometry.state_slot_stride + (i64)blockIdx.x * MATRIX);
    for (int i = threadIdx.x; i < VECTORS; i += THREADS) matrix[i] = make_uint4(0, 0, 0, 0);

    // Both layouts hold a line in one piece, of which each block takes a head's length.
    const i64 length = (i64)CHANNELS * geometry.conv_length;
    bf16_bits* line = conv_cache + slot * geometry.conv_slot_stride + blockIdx.x * length;
    for (i64 i = threadIdx.x; i < length; i += THREADS) line[i] = 0;
}
