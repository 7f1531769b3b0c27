// The arguments to every kernel, for launches on a GPU and for tests on the CPU. Both include this
// file and define `kernels!`, `plain_kernels!`, `In` (a pointer to read from, which may be null)
// and `Out` (a pointer to write to). In `kernels!`, `Self` is an element type, and the kernel
// `name` is `name_f32`, `name_bf16` and `name_f16` in the `.cu` file.
kernels! {
    add {
        add_forward(a: In<Self>, b: In<Self>, sum: Out<Self>, n: u64);
    }
    add_bias {
        add_bias(x0: In<Self>, x1: In<Self>, x2: In<Self>, bias0: In<Self>, bias1: In<Self>, bias2: In<Self>, y0: Out<Self>,
            y1: Out<Self>, y2: Out<Self>, n: u32, columns0: u32, columns1: u32, columns2: u32);
        add_bias_gradient(gradient: In<Self>, sum: Out<f32>, n: u64, columns: i32);
    }
    attention {
        attention_forward_64(query: In<Self>, key: In<Self>, value: In<Self>, mask: In<u8>, sequences: In<u32>, y: Out<Self>,
            log_sums: Out<f32>, tiles: u32, kv_heads: u32, group: u32, head_dim: i32, scale: f32);
        attention_of_query_64(query: In<Self>, key: In<Self>, value: In<Self>, mask: In<u8>, sequences: In<u32>, y: In<Self>,
            gradient: In<Self>, log_sums: In<f32>, dots: Out<f32>, of_query: Out<Self>, tiles: u32, kv_heads: u32, group: u32,
            head_dim: i32, scale: f32);
        attention_of_key_64(query: In<Self>, key: In<Self>, value: In<Self>, mask: In<u8>, sequences: In<u32>,
            gradient: In<Self>, log_sums: In<f32>, dots: In<f32>, of_key: Out<Self>, of_value: Out<Self>, tiles: u32,
            kv_heads: u32, group: u32, head_dim: i32, scale: f32);
        attention_forward_128(query: In<Self>, key: In<Self>, value: In<Self>, mask: In<u8>, sequences: In<u32>, y: Out<Self>,
            log_sums: Out<f32>, tiles: u32, kv_heads: u32, group: u32, head_dim: i32, scale: f32);
        attention_of_query_128(query: In<Self>, key: In<Self>, value: In<Self>, mask: In<u8>, sequences: In<u32>, y: In<Self>,
            gradient: In<Self>, log_sums: In<f32>, dots: Out<f32>, of_query: Out<Self>, tiles: u32, kv_heads: u32, group: u32,
            head_dim: i32, scale: f32);
        attention_of_key_128(query: In<Self>, key: In<Self>, value: In<Self>, mask: In<u8>, sequences: In<u32>,
            gradient: In<Self>, log_sums: In<f32>, dots: In<f32>, of_key: Out<Self>, of_value: Out<Self>, tiles: u32,
            kv_heads: u32, group: u32, head_dim: i32, scale: f32);
        attention_forward_256(query: In<Self>, key: In<Self>, value: In<Self>, mask: In<u8>, sequences: In<u32>, y: Out<Self>,
            log_sums: Out<f32>, tiles: u32, kv_heads: u32, group: u32, head_dim: i32, scale: f32);
        attention_of_query_256(query: In<Self>, key: In<Self>, value: In<Self>, mask: In<u8>, sequences: In<u32>, y: In<Self>,
            gradient: In<Self>, log_sums: In<f32>, dots: Out<f32>, of_query: Out<Self>, tiles: u32, kv_heads: u32, group: u32,
            head_dim: i32, scale: f32);
        attention_of_key_256(query: In<Self>, key: In<Self>, value: In<Self>, mask: In<u8>, sequences: In<u32>,
            gradient: In<Self>, log_sums: In<f32>, dots: In<f32>, of_key: Out<Self>, of_value: Out<Self>, tiles: u32,
            kv_heads: u32, group: u32, head_dim: i32, scale: f32);
        scored_attention_forward_64(query: In<Self>, key: In<Self>, value: In<Self>, mask: In<u8>, sequences: In<u32>,
            y: Out<Self>, log_sums: Out<f32>, tiles: u32, kv_heads: u32, group: u32, head_dim: i32, scale: f32, window: i32,
            cap: f32);
        scored_attention_of_query_64(query: In<Self>, key: In<Self>, value: In<Self>, mask: In<u8>, sequences: In<u32>,
            y: In<Self>, gradient: In<Self>, log_sums: In<f32>, dots: Out<f32>, of_query: Out<Self>, tiles: u32,
            kv_heads: u32, group: u32, head_dim: i32, scale: f32, window: i32, cap: f32);
        scored_attention_of_key_64(query: In<Self>, key: In<Self>, value: In<Self>, mask: In<u8>, sequences: In<u32>,
            gradient: In<Self>, log_sums: In<f32>, dots: In<f32>, of_key: Out<Self>, of_value: Out<Self>, tiles: u32,
            kv_heads: u32, group: u32, head_dim: i32, scale: f32, window: i32, cap: f32);
        scored_attention_forward_128(query: In<Self>, key: In<Self>, value: In<Self>, mask: In<u8>, sequences: In<u32>,
            y: Out<Self>, log_sums: Out<f32>, tiles: u32, kv_heads: u32, group: u32, head_dim: i32, scale: f32, window: i32,
            cap: f32);
        scored_attention_of_query_128(query: In<Self>, key: In<Self>, value: In<Self>, mask: In<u8>, sequences: In<u32>,
            y: In<Self>, gradient: In<Self>, log_sums: In<f32>, dots: Out<f32>, of_query: Out<Self>, tiles: u32,
            kv_heads: u32, group: u32, head_dim: i32, scale: f32, window: i32, cap: f32);
        scored_attention_of_key_128(query: In<Self>, key: In<Self>, value: In<Self>, mask: In<u8>, sequences: In<u32>,
            gradient: In<Self>, log_sums: In<f32>, dots: In<f32>, of_key: Out<Self>, of_value: Out<Self>, tiles: u32,
            kv_heads: u32, group: u32, head_dim: i32, scale: f32, window: i32, cap: f32);
        scored_attention_forward_256(query: In<Self>, key: In<Self>, value: In<Self>, mask: In<u8>, sequences: In<u32>,
            y: Out<Self>, log_sums: Out<f32>, tiles: u32, kv_heads: u32, group: u32, head_dim: i32, scale: f32, window: i32,
            cap: f32);
        scored_attention_of_query_256(query: In<Self>, key: In<Self>, value: In<Self>, mask: In<u8>, sequences: In<u32>,
            y: In<Self>, gradient: In<Self>, log_sums: In<f32>, dots: Out<f32>, of_query: Out<Self>, tiles: u32,
            kv_heads: u32, group: u32, head_dim: i32, scale: f32, window: i32, cap: f32);
        scored_attention_of_key_256(query: In<Self>, key: In<Self>, value: In<Self>, mask: In<u8>, sequences: In<u32>,
            gradient: In<Self>, log_sums: In<f32>, dots: In<f32>, of_key: Out<Self>, of_value: Out<Self>, tiles: u32,
            kv_heads: u32, group: u32, head_dim: i32, scale: f32, window: i32, cap: f32);
    }
    causal_conv {
        causal_conv_forward(x: In<Self>, weight: In<Self>, before: In<u32>, segments: In<u32>, segment_of: In<u32>, y: Out<Self>,
            n: u64, rows: u32, channels: i32, taps: i32);
        causal_conv_backward(x: In<Self>, weight: In<Self>, gradient: In<Self>, before: In<u32>, segments: In<u32>,
            segment_of: In<u32>, of_x: Out<Self>, parts: Out<f32>, n: u64, rows: u32, channels: i32, taps: i32);
        causal_conv_of_last_rows(x: In<Self>, weight: In<Self>, gradient: In<Self>, before: In<u32>, segments: In<u32>,
            of_x: Out<Self>, channels: i32, taps: i32);
        causal_conv_of_weight(parts: In<f32>, gradient: Out<Self>, count: i32, channels: i32, taps: i32);
        causal_conv_step(x: In<Self>, weight: In<Self>, sequences: In<u32>, windows: Out<f32>, y: Out<Self>, channels: i32,
            taps: i32);
    }
    dequantize {
        dequantize(blocks: In<u8>, y: Out<Self>, n: u64, bytes: u32);
    }
    draw_tokens {
        draw_parts(logits: In<Self>, draws: In<u32>, largest: Out<f32>, sums: Out<f64>, vocab: u32, parts: u32,
            inverse_temperature: f32);
        draw_tokens(logits: In<Self>, draws: In<u32>, largest: In<f32>, sums: In<f64>, drawn: Out<u32>, n: u32, vocab: u32,
            inverse_temperature: f32, top_k: u32, top_p: f64, min_p: f64, greedy: u32);
    }
    embedding {
        embedding_forward(weight: In<Self>, ids: In<u32>, rows: Out<Self>, n: u64, vocab: u32, width: i32);
        embedding_add(gradient: In<Self>, ids: In<u32>, starts: In<u32>, positions: In<u32>, sum: Out<f32>, vocab: u32,
            width: i32);
        embedding_sum(x: In<Self>, starts: In<u32>, positions: In<u32>, sums: Out<Self>, n: u64, width: i32);
    }
    experts {
        experts_gate_up(x: In<Self>, weights: In<u64>, chosen: In<u32>, inner: Out<Self>, pairs: u32, top_k: u32, experts: u32,
            hidden: i32, width: i32);
        experts_down(inner: In<Self>, weights: In<u64>, chosen: In<u32>, parts: Out<f32>, pairs: u32, experts: u32,
            hidden: i32, width: i32);
        experts_sum(parts: In<f32>, chosen: In<u32>, gates: In<f32>, y: Out<Self>, n: u64, top_k: u32, experts: u32,
            hidden: u32);
    }
    gated_delta_rule {
        gated_delta_rule_forward(qkv: In<Self>, g: In<f32>, beta: In<f32>, segments: In<u32>, states: Out<f32>, o: Out<Self>,
            errors: Out<f32>, changes: Out<f32>, first_segment: u32, advance: u32, key_heads: i32, value_heads: i32,
            key_dim: i32, value_dim: i32);
        gated_delta_rule_backward(qkv: In<Self>, g: In<f32>, beta: In<f32>, gradient: In<Self>, segments: In<u32>,
            states: In<f32>, errors: In<f32>, changes: In<f32>, state_gradients: Out<f32>, key_gradients: Out<f32>,
            of_qkv: Out<Self>, of_g: Out<f32>, of_beta: Out<f32>, first_segment: u32, key_heads: i32, value_heads: i32,
            key_dim: i32, value_dim: i32);
        gated_delta_rule_keys(qkv: In<Self>, key_gradients: In<f32>, of_qkv: Out<Self>, n: u64, key_heads: i32,
            value_heads: i32, key_dim: i32, value_dim: i32);
        gated_delta_rule_step(qkv: In<Self>, g: In<f32>, beta: In<f32>, sequences: In<u32>, states: Out<f32>, o: Out<Self>,
            key_heads: i32, value_heads: i32, key_dim: i32, value_dim: i32);
    }
    linear_rows {
        linear_rows_16(x: In<Self>, blocks0: In<u8>, blocks1: In<u8>, blocks2: In<u8>, blocks3: In<u8>, y: Out<Self>,
            parts: Out<f32>, n: u32, inputs: u32, outputs0: u32, outputs1: u32, outputs2: u32, outputs3: u32, bytes0: u32, bytes1: u32,
            bytes2: u32, bytes3: u32);
        linear_rows_64(x: In<Self>, blocks0: In<u8>, blocks1: In<u8>, blocks2: In<u8>, blocks3: In<u8>, y: Out<Self>,
            parts: Out<f32>, n: u32, inputs: u32, outputs0: u32, outputs1: u32, outputs2: u32, outputs3: u32, bytes0: u32, bytes1: u32,
            bytes2: u32, bytes3: u32);
        linear_rows_sum(parts: In<f32>, y: Out<Self>, len: u64, count: u32);
    }
    log_prob {
        log_prob_forward(logits: In<Self>, targets: In<u32>, mask: In<u8>, packed: Out<f32>, n: u64, vocab: u64,
            inverse_temperature: f32);
        log_prob_backward(logits: In<Self>, targets: In<u32>, mask: In<u8>, packed: In<f32>, packed_gradient: In<f32>,
            gradient: Out<Self>, n: u64, vocab: u64, inverse_temperature: f32);
    }
    column_sums {
        column_sums(parts: In<f32>, sums: Out<Self>, first_rows: i32, second_rows: i32, columns: i32);
    }
    delta_gates {
        delta_gates_forward(a: In<Self>, b: In<Self>, a_log: In<Self>, dt_bias: In<Self>, g: Out<f32>, beta: Out<f32>, n: u64,
            heads: u32);
        delta_gates_backward(a: In<Self>, b: In<Self>, a_log: In<Self>, dt_bias: In<Self>, of_g: In<f32>, of_beta: In<f32>,
            of_a: Out<Self>, of_b: Out<Self>, partial: Out<f32>, n: u64, heads: u32);
    }
    gate_heads {
        gate_heads(x: In<Self>, query: In<Self>, y: Out<Self>, n: u64, head_dim: i32);
    }
    head_transform {
        head_transform_forward(query: In<Self>, query_weight: In<Self>, key: In<Self>, key_weight: In<Self>, cos: In<f32>,
            sin: In<f32>, to_query: Out<Self>, to_key: Out<Self>, n: u32, heads: u32, kv_heads: u32, query_step: i32,
            head_dim: i32, pairs: i32, sign: f32, epsilon: f32, offset: f32);
        head_transform_backward(query: In<Self>, query_weight: In<Self>, query_gradient: In<Self>, key: In<Self>,
            key_weight: In<Self>, key_gradient: In<Self>, cos: In<f32>, sin: In<f32>, of_gated: In<Self>, mixed: In<Self>,
            of_query: Out<Self>, of_key: Out<Self>, partial: Out<f32>, n: u32, heads: u32, kv_heads: u32, query_blocks: u32,
            query_step: i32, head_dim: i32, pairs: i32, epsilon: f32, offset: f32);
    }
    linear_log_prob {
        linear_log_prob_gradient(logits: In<f32>, targets: In<u32>, mask: In<u8>, packed: In<f32>, packed_gradient: In<f32>,
            gradient: Out<Self>, n: u64, columns: u64, first_column: u32, inverse_temperature: f32);
    }
    paged_attention {
        paged_write(query: In<Self>, query_weight: In<Self>, key: In<Self>, key_weight: In<Self>, value: In<Self>, cos: In<f32>,
            sin: In<f32>, slots: In<u32>, rotated: Out<Self>, keys: Out<Self>, values: Out<Self>, n: u32, heads: u32,
            kv_heads: u32, query_step: i32, head_dim: i32, pairs: i32, epsilon: f32, offset: f32);
        paged_attention_64_2(query: In<Self>, keys: In<Self>, values: In<Self>, rows: In<u32>, spans: In<u32>,
            shared: In<u32>, y: Out<Self>, partial: Out<f32>, n: u32, count: u32, kv_heads: u32, group: u32, parts: u32,
            head_dim: i32, scale: f32);
        paged_attention_64_4(query: In<Self>, keys: In<Self>, values: In<Self>, rows: In<u32>, spans: In<u32>,
            shared: In<u32>, y: Out<Self>, partial: Out<f32>, n: u32, count: u32, kv_heads: u32, group: u32, parts: u32,
            head_dim: i32, scale: f32);
        paged_attention_64_8(query: In<Self>, keys: In<Self>, values: In<Self>, rows: In<u32>, spans: In<u32>,
            shared: In<u32>, y: Out<Self>, partial: Out<f32>, n: u32, count: u32, kv_heads: u32, group: u32, parts: u32,
            head_dim: i32, scale: f32);
        paged_attention_128_2(query: In<Self>, keys: In<Self>, values: In<Self>, rows: In<u32>, spans: In<u32>,
            shared: In<u32>, y: Out<Self>, partial: Out<f32>, n: u32, count: u32, kv_heads: u32, group: u32, parts: u32,
            head_dim: i32, scale: f32);
        paged_attention_128_4(query: In<Self>, keys: In<Self>, values: In<Self>, rows: In<u32>, spans: In<u32>,
            shared: In<u32>, y: Out<Self>, partial: Out<f32>, n: u32, count: u32, kv_heads: u32, group: u32, parts: u32,
            head_dim: i32, scale: f32);
        paged_attention_128_8(query: In<Self>, keys: In<Self>, values: In<Self>, rows: In<u32>, spans: In<u32>,
            shared: In<u32>, y: Out<Self>, partial: Out<f32>, n: u32, count: u32, kv_heads: u32, group: u32, parts: u32,
            head_dim: i32, scale: f32);
        paged_attention_256_2(query: In<Self>, keys: In<Self>, values: In<Self>, rows: In<u32>, spans: In<u32>,
            shared: In<u32>, y: Out<Self>, partial: Out<f32>, n: u32, count: u32, kv_heads: u32, group: u32, parts: u32,
            head_dim: i32, scale: f32);
        paged_attention_256_4(query: In<Self>, keys: In<Self>, values: In<Self>, rows: In<u32>, spans: In<u32>,
            shared: In<u32>, y: Out<Self>, partial: Out<f32>, n: u32, count: u32, kv_heads: u32, group: u32, parts: u32,
            head_dim: i32, scale: f32);
        paged_attention_256_8(query: In<Self>, keys: In<Self>, values: In<Self>, rows: In<u32>, spans: In<u32>,
            shared: In<u32>, y: Out<Self>, partial: Out<f32>, n: u32, count: u32, kv_heads: u32, group: u32, parts: u32,
            head_dim: i32, scale: f32);
        paged_attention_merge(partial: In<f32>, rows: In<u32>, shared: In<u32>, y: Out<Self>, n: u32, heads: u32, parts: u32,
            head_dim: i32);
        shared_paged_attention_64(query: In<Self>, keys: In<Self>, values: In<Self>, rows: In<u32>, spans: In<u32>,
            shared: In<u32>, members: In<u32>, starts: In<u32>, partial: Out<f32>, n: u32, count: u32, kv_heads: u32,
            group: u32, parts: u32, head_dim: i32, scale: f32);
        shared_paged_attention_128(query: In<Self>, keys: In<Self>, values: In<Self>, rows: In<u32>, spans: In<u32>,
            shared: In<u32>, members: In<u32>, starts: In<u32>, partial: Out<f32>, n: u32, count: u32, kv_heads: u32,
            group: u32, parts: u32, head_dim: i32, scale: f32);
        scored_paged_attention_64_2(query: In<Self>, keys: In<Self>, values: In<Self>, rows: In<u32>, spans: In<u32>,
            shared: In<u32>, y: Out<Self>, partial: Out<f32>, n: u32, count: u32, kv_heads: u32, group: u32, parts: u32,
            head_dim: i32, scale: f32, window: u32, cap: f32);
        scored_paged_attention_64_4(query: In<Self>, keys: In<Self>, values: In<Self>, rows: In<u32>, spans: In<u32>,
            shared: In<u32>, y: Out<Self>, partial: Out<f32>, n: u32, count: u32, kv_heads: u32, group: u32, parts: u32,
            head_dim: i32, scale: f32, window: u32, cap: f32);
        scored_paged_attention_64_8(query: In<Self>, keys: In<Self>, values: In<Self>, rows: In<u32>, spans: In<u32>,
            shared: In<u32>, y: Out<Self>, partial: Out<f32>, n: u32, count: u32, kv_heads: u32, group: u32, parts: u32,
            head_dim: i32, scale: f32, window: u32, cap: f32);
        scored_paged_attention_128_2(query: In<Self>, keys: In<Self>, values: In<Self>, rows: In<u32>, spans: In<u32>,
            shared: In<u32>, y: Out<Self>, partial: Out<f32>, n: u32, count: u32, kv_heads: u32, group: u32, parts: u32,
            head_dim: i32, scale: f32, window: u32, cap: f32);
        scored_paged_attention_128_4(query: In<Self>, keys: In<Self>, values: In<Self>, rows: In<u32>, spans: In<u32>,
            shared: In<u32>, y: Out<Self>, partial: Out<f32>, n: u32, count: u32, kv_heads: u32, group: u32, parts: u32,
            head_dim: i32, scale: f32, window: u32, cap: f32);
        scored_paged_attention_128_8(query: In<Self>, keys: In<Self>, values: In<Self>, rows: In<u32>, spans: In<u32>,
            shared: In<u32>, y: Out<Self>, partial: Out<f32>, n: u32, count: u32, kv_heads: u32, group: u32, parts: u32,
            head_dim: i32, scale: f32, window: u32, cap: f32);
        scored_paged_attention_256_2(query: In<Self>, keys: In<Self>, values: In<Self>, rows: In<u32>, spans: In<u32>,
            shared: In<u32>, y: Out<Self>, partial: Out<f32>, n: u32, count: u32, kv_heads: u32, group: u32, parts: u32,
            head_dim: i32, scale: f32, window: u32, cap: f32);
        scored_paged_attention_256_4(query: In<Self>, keys: In<Self>, values: In<Self>, rows: In<u32>, spans: In<u32>,
            shared: In<u32>, y: Out<Self>, partial: Out<f32>, n: u32, count: u32, kv_heads: u32, group: u32, parts: u32,
            head_dim: i32, scale: f32, window: u32, cap: f32);
        scored_paged_attention_256_8(query: In<Self>, keys: In<Self>, values: In<Self>, rows: In<u32>, spans: In<u32>,
            shared: In<u32>, y: Out<Self>, partial: Out<f32>, n: u32, count: u32, kv_heads: u32, group: u32, parts: u32,
            head_dim: i32, scale: f32, window: u32, cap: f32);
    }
    rms_norm {
        rms_norm_forward(x: In<Self>, weight: In<Self>, y: Out<Self>, n: u64, width: i32, epsilon: f32, offset: f32);
        rms_norm_add_forward(x: In<Self>, change: In<Self>, weight: In<Self>, sum: Out<Self>, y: Out<Self>, n: u64, width: i32,
            epsilon: f32, offset: f32);
        rms_norm_backward(x: In<Self>, weight: In<Self>, gradient: In<Self>, dx: Out<Self>, partial: Out<f32>, n: u64,
            width: i32, epsilon: f32, offset: f32);
    }
    route {
        route(logits: In<Self>, chosen: Out<u32>, gates: Out<f32>, n: u32, experts: u32, top_k: u32, normalize: u32);
    }
    swiglu {
        swiglu_forward(gate: In<Self>, up: In<Self>, y: Out<Self>, n: u64);
        swiglu_backward(gate: In<Self>, up: In<Self>, gradient: In<Self>, dgate: Out<Self>, dup: Out<Self>, n: u64);
        geglu_forward(gate: In<Self>, up: In<Self>, y: Out<Self>, n: u64);
        geglu_backward(gate: In<Self>, up: In<Self>, gradient: In<Self>, dgate: Out<Self>, dup: Out<Self>, n: u64);
    }
}

// Kernels without an element type.
plain_kernels! {
    adamw {
        adamw(list: In<u64>, count: u32, gradient_factor: f32, beta1: f32, one_minus_beta1: f32, beta2: f32,
            one_minus_beta2: f32, epsilon: f32, step_size: f32, inverse_root_correction: f32, number: u32);
        adamw_quantized(list: In<u64>, maps: In<f32>, count: u32, gradient_factor: f32, beta1: f32, one_minus_beta1: f32,
            beta2: f32, one_minus_beta2: f32, epsilon: f32, step_size: f32, inverse_root_correction: f32, number: u32);
    }
    embedding {
        embedding_sort(ids: In<u32>, counts: Out<u32>, starts: Out<u32>, ranks: Out<u32>, positions: Out<u32>, n: u32,
            vocab: u32);
    }
    gradient_norm {
        gradient_squares(list: In<u64>, count: u32, parts: Out<f64>);
        gradient_sum_parts(list: In<u64>, parts: In<f64>, sums: Out<f64>);
        gradient_scale(list: In<u64>, count: u32, factor: f32);
    }
    policy_loss {
        policy_loss_forward(log_probs: In<f32>, old_log_probs: In<f32>, ref_log_probs: In<f32>, entropy: In<f32>,
            advantages: In<f32>, first_factors: In<f32>, second_factors: In<f32>, token_weights: In<f32>,
            prompt_tokens: In<f32>, mask: In<u8>, policy_mask: In<u8>, entropy_mask: In<u8>, of_log_probs: Out<f32>,
            of_entropy: Out<f32>, parts: Out<f64>, tokens: u32, chunks: u32, per_token: u32, surrogate: u32, low: f32,
            high: f32, delta: f32, dual_clip: f32, drop_low: f32, drop_high: f32, log_ratio_clamp: f32, kl_form: u32,
            kl_coef: f32, kl_log_ratio_clamp: f32, kl_value_clamp: f32, kl_max_log_weight: f32, old_kl_form: u32,
            old_kl_coef: f32, old_kl_log_ratio_clamp: f32, old_kl_value_clamp: f32, old_kl_max_log_weight: f32,
            divisor: u32, scale: f64, entropy_divisor: u32, entropy_scale: f64);
        policy_loss_merge(parts: In<f64>, statistics: Out<f64>, loss: Out<f32>, count: u32);
        policy_loss_backward(of_log_probs: In<f32>, of_entropy: In<f32>, gradient: In<f32>, log_prob_gradient: Out<f32>,
            entropy_gradient: Out<f32>, n: u64);
    }
    rope {
        rope_angles(positions: In<u32>, inverse_frequencies: In<f32>, cos: Out<f32>, sin: Out<f32>, n: u64, pairs: u32,
            factor: f32);
    }
    linear_log_prob {
        linear_log_prob_tile(logits: In<f32>, targets: In<u32>, mask: In<u8>, state: Out<f32>, packed: Out<f32>, n: u64,
            columns: u64, first_column: u32, vocab: u64, inverse_temperature: f32);
    }
}
