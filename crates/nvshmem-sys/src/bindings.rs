//! What bindgen made. Names and layouts are C's.

#![allow(
    missing_docs,
    missing_debug_implementations,
    non_camel_case_types,
    non_snake_case,
    non_upper_case_globals,
    unused_qualifications,
    clippy::all,
    clippy::undocumented_unsafe_blocks,
    clippy::allow_attributes_without_reason,
    clippy::use_self,
    clippy::semicolon_if_nothing_returned,
    clippy::cast_lossless,
    clippy::uninlined_format_args,
    clippy::manual_let_else,
    reason = "generated"
)]

include!(concat!(env!("OUT_DIR"), "/bindings.rs"));
