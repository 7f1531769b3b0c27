//! Pretrained models with their tokenizers and chat templates.

mod character_tokenizer;
mod chat_template;
mod generation_defaults;
mod gguf_tokenizer;
pub(crate) mod pretrained;
pub(crate) mod special_tokens;
mod tokenizer_json;

pub use character_tokenizer::character_tokenizer;
pub(crate) use chat_template::{ANSWER, DEFAULT};
pub use chat_template::{Chat, ChatTemplate, EncodedChat, RenderedChat};
pub use generation_defaults::GenerationDefaults;
pub use pretrained::Pretrained;
pub use special_tokens::{SpecialToken, SpecialTokens};
