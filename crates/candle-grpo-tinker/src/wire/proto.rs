//! The protobuf messages. Names and tags match the client's `tinker_public.proto`.

use std::collections::HashMap;

use bytes::Bytes;

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct ForwardBackwardRequest {
    #[prost(string, tag = "1")]
    pub(crate) model_id: String,
    #[prost(int32, tag = "2")]
    pub(crate) seq_id: i32,
    #[prost(message, repeated, tag = "3")]
    pub(crate) data: Vec<Datum>,
    #[prost(string, tag = "4")]
    pub(crate) loss_fn: String,
    #[prost(map = "string, double", tag = "5")]
    pub(crate) loss_fn_config: HashMap<String, f64>,
    #[prost(bool, tag = "6")]
    pub(crate) forward_only: bool,
    #[prost(map = "string, message", tag = "7")]
    pub(crate) loss_fn_config_v2: HashMap<String, LossConfigValue>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct LossConfigValue {
    #[prost(oneof = "loss_config_value::Value", tags = "1, 2")]
    pub(crate) value: Option<loss_config_value::Value>,
}

pub(crate) mod loss_config_value {
    #[derive(Clone, PartialEq, prost::Oneof)]
    pub(crate) enum Value {
        #[prost(double, tag = "1")]
        Number(f64),
        #[prost(string, tag = "2")]
        Text(String),
    }
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct Datum {
    #[prost(message, repeated, tag = "1")]
    pub(crate) model_input: Vec<Chunk>,
    #[prost(map = "string, message", tag = "2")]
    pub(crate) loss_fn_inputs: HashMap<String, Tensor>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct Chunk {
    #[prost(oneof = "chunk::Chunk", tags = "1, 2, 3")]
    pub(crate) chunk: Option<chunk::Chunk>,
}

pub(crate) mod chunk {
    #[derive(Clone, PartialEq, prost::Oneof)]
    pub(crate) enum Chunk {
        #[prost(message, tag = "1")]
        EncodedText(super::EncodedTextChunk),
        #[prost(message, tag = "2")]
        Image(super::OtherChunk),
        #[prost(message, tag = "3")]
        Dmel(super::OtherChunk),
    }
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct EncodedTextChunk {
    /// i32, little endian.
    #[prost(bytes = "bytes", tag = "1")]
    pub(crate) tokens: Bytes,
}

/// A chunk that is not text, whose fields are not read.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct OtherChunk {}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct Tensor {
    #[prost(oneof = "tensor::Encoding", tags = "1, 2")]
    pub(crate) encoding: Option<tensor::Encoding>,
    #[prost(enumeration = "DType", tag = "3")]
    pub(crate) dtype: i32,
    #[prost(int64, repeated, tag = "4")]
    pub(crate) shape: Vec<i64>,
}

pub(crate) mod tensor {
    #[derive(Clone, PartialEq, prost::Oneof)]
    pub(crate) enum Encoding {
        #[prost(bytes = "bytes", tag = "1")]
        Dense(bytes::Bytes),
        #[prost(message, tag = "2")]
        SparseCsr(super::OtherChunk),
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub(crate) enum DType {
    Unspecified = 0,
    Float32 = 1,
    Int64 = 2,
    Int32 = 3,
    Bfloat16 = 4,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct ForwardBackwardOutput {
    #[prost(string, tag = "1")]
    pub(crate) loss_fn_output_type: String,
    #[prost(message, repeated, tag = "2")]
    pub(crate) loss_fn_outputs: Vec<ArrayRecord>,
    #[prost(map = "string, double", tag = "3")]
    pub(crate) metrics: HashMap<String, f64>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct ArrayRecord {
    #[prost(string, tag = "1")]
    pub(crate) type_tag: String,
    #[prost(map = "string, message", tag = "2")]
    pub(crate) fields: HashMap<String, BatchedTensor>,
    #[prost(int64, tag = "3")]
    pub(crate) num_datums: i64,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct BatchedTensor {
    #[prost(bytes = "bytes", tag = "1")]
    pub(crate) data: Bytes,
    /// The parts' byte offsets, i64, little endian.
    #[prost(bytes = "bytes", tag = "2")]
    pub(crate) offsets: Bytes,
    #[prost(enumeration = "DType", tag = "3")]
    pub(crate) dtype: i32,
    #[prost(int64, repeated, tag = "4")]
    pub(crate) trailing_shape: Vec<i64>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct SampleResponse {
    #[prost(message, repeated, tag = "1")]
    pub(crate) sequences: Vec<SampledSequence>,
    /// f32, little endian.
    #[prost(bytes = "bytes", optional, tag = "2")]
    pub(crate) prompt_logprobs: Option<Bytes>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct SampledSequence {
    /// 0 at a stop, 1 at the maximum length.
    #[prost(int32, tag = "1")]
    pub(crate) stop_reason: i32,
    /// i32, little endian.
    #[prost(bytes = "bytes", tag = "2")]
    pub(crate) tokens: Bytes,
    /// f32, little endian.
    #[prost(bytes = "bytes", optional, tag = "3")]
    pub(crate) logprobs: Option<Bytes>,
}
