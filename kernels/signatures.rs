// The arguments of every kernel, once for the launches on a GPU and once for the tests on the CPU: whoever includes this
// file defines `kernels!`, `In` (a pointer that is read, null where it may be), `Out` (a pointer that is written) and an element
// type `Self`. A kernel `name` stands for `name_f32`, `name_bf16` and `name_f16` in `FILE`.cu.
kernels! {
    log_prob LOG_PROB {
        log_prob_forward(logits: In<Self>, targets: In<u32>, mask: In<u8>, packed: Out<f32>, n: u64, vocab: u64,
            inverse_temperature: f32);
        log_prob_backward(logits: In<Self>, targets: In<u32>, mask: In<u8>, packed: In<f32>, packed_gradient: In<f32>,
            gradient: Out<Self>, n: u64, vocab: u64, inverse_temperature: f32);
    }
}
