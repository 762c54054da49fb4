//! Chat templates: from a conversation to the prompt a model was trained on.

mod json;
mod messages;
mod python;
mod template;
mod time;

pub use template::{ChatOptions, ChatTemplate};
