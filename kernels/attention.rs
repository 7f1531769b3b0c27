// Tile sizes in `attention.cu`, for the launches.

/// The kernels' tiles for a head dimension.
#[derive(Debug, Clone, Copy)]
struct AttentionTiles {
    /// Maximum head width: 64, 128 or 256.
    width: usize,
    /// Threads per forward block, and the rows that it keeps.
    forward_threads: usize,
    forward_rows: usize,
    /// The same for the backward pass.
    threads: usize,
    rows: usize,
    /// Number of blocks that share the columns of the key and value gradients.
    parts: usize,
    /// Shared memory for the forward pass, the query gradient, and the key and value gradients.
    forward_bytes: usize,
    query_bytes: usize,
    key_bytes: usize,
}

/// Returns `None` if the head dimension is too large. `element` is an element's size in bytes.
/// `has_warpgroups` means that the code uses warpgroup products.
fn attention_tiles(
    head_dim: usize,
    element: usize,
    has_warpgroups: bool,
) -> Option<AttentionTiles> {
    let width = *[64, 128, 256].iter().find(|width| head_dim <= **width)?;
    let is_wide = element == 4;
    let on_warpgroup = has_warpgroups && !is_wide;
    let rows = if is_wide && width == 256 { 32 } else { 64 };
    let threads = 2 * rows;
    let forward_threads = if on_warpgroup && width < 256 { 2 * threads } else { threads };
    let has_two_groups = !is_wide && !on_warpgroup && width < 256;
    let forward_rows = forward_threads / 2 * if has_two_groups { 2 } else { 1 };
    let keys = match (is_wide, width) {
        (true, 256) => 16,
        (true, _) | (false, 256) => 32,
        (false, _) => 64,
    };
    let others = match (is_wide, width) {
        _ if on_warpgroup => keys,
        (true, 64) | (false, 64 | 128) => 32,
        _ => 16,
    };
    let row_bytes = width * element + if on_warpgroup { 0 } else { 16 };
    // Two tiles per operand, and three numbers per loaded row, once or twice.
    let kept_bytes = 2 * rows * row_bytes;
    let stage_bytes = 2 * others * row_bytes + 12 * others;
    let one = kept_bytes + stage_bytes;
    let key_bytes = if one + stage_bytes <= 99 << 10 { one + stage_bytes } else { one };
    Some(AttentionTiles {
        width,
        forward_threads,
        forward_rows,
        threads,
        rows,
        parts: width.div_ceil(128),
        // Queries, keys, values, and a mark per key.
        forward_bytes: (forward_rows + 2 * keys) * row_bytes + 4 * keys,
        query_bytes: if on_warpgroup && width == 128 { one } else { key_bytes },
        key_bytes,
    })
}
