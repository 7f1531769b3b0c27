// The tiles of `attention.cu`, for the launches and for the tests on the CPU. Both include this
// file to compute blocks and shared memory.

/// Tiles of the kernels for a head dimension.
#[derive(Debug, Clone, Copy)]
struct AttentionTiles {
    /// Maximum width of a head: 64, 128 or 256.
    width: usize,
    /// Threads of a block.
    threads: usize,
    /// Rows that a block keeps in the forward pass, and in the backward pass.
    forward_rows: usize,
    rows: usize,
    /// Blocks that share the columns of the gradients of keys and values.
    parts: usize,
    /// Shared memory of the forward and of the backward pass.
    forward_bytes: usize,
    backward_bytes: usize,
}

/// Returns `None` for a head dimension that is too large. `element` is the size of an element in
/// bytes.
fn attention_tiles(head_dim: usize, element: usize) -> Option<AttentionTiles> {
    let width = *[64, 128, 256].iter().find(|width| head_dim <= **width)?;
    let is_wide = element == 4;
    let rows = if is_wide && width == 256 { 32 } else { 64 };
    let keys = match (is_wide, width) {
        (true, 256) => 16,
        (true, _) | (false, 256) => 32,
        (false, _) => 64,
    };
    let others = match (is_wide, width) {
        (true, 64) | (false, 64 | 128) => 32,
        _ => 16,
    };
    let forward_rows = if is_wide || width == 256 { rows } else { 2 * rows };
    let row_bytes = width * element + 16;
    // Two tiles of each operand, and three numbers for each loaded row, once or twice.
    let kept_bytes = 2 * rows * row_bytes;
    let stage_bytes = 2 * others * row_bytes + 12 * others;
    let both = kept_bytes + 2 * stage_bytes;
    Some(AttentionTiles {
        width,
        threads: 2 * rows,
        forward_rows,
        rows,
        parts: width.div_ceil(128),
        // Queries, keys, values, and a mark for each key.
        forward_bytes: (forward_rows + 2 * keys) * row_bytes + 4 * keys,
        backward_bytes: if both <= 99 << 10 { both } else { kept_bytes + stage_bytes },
    })
}
