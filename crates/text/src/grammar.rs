//! Structured output: which tokens keep the answer inside a JSON schema.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use llguidance::api::{ParserLimits, StopReason, TopLevelGrammar};
use llguidance::{Matcher, ParserFactory};
use microserving_protocol::TokenId;
use serde_json::{Value, json};
use toktrie::{TokEnv, TokRxInfo, TokTrie, TokenizerEnv};

use crate::error::TextError;
use crate::token_table::TokenKind;
use crate::tokenizer::Tokenizer;

/// The field of a request that grammars come from.
const FIELD: &str = "response_format";
const SCHEMA_FIELD: &str = "response_format.json_schema.schema";
/// The largest schema, in bytes of JSON.
const MAX_SCHEMA_BYTES: usize = 128 << 10;
/// The deepest schema.
const MAX_SCHEMA_DEPTH: usize = 64;
/// Compiled grammars kept for requests to come.
const MAX_CACHED: usize = 16;
/// Tokens longer than this stay out of the trie: no grammar needs them.
const MAX_TOKEN_BYTES: usize = 1 << 10;
/// Between two symbols of JSON: enough for a deep indentation, but a model that has lost its way cannot fill
/// the context with spaces.
const WHITESPACE: &str = r"[\x20\x0A\x0D\x09]{1,40}";

/// What an answer must look like.
#[derive(Clone, Debug, PartialEq)]
pub enum GrammarSpec {
    /// Any JSON object.
    JsonObject,
    /// A JSON value that the schema accepts.
    JsonSchema(Value),
}

/// Compiles grammars for one model.
///
/// The vocabulary is prepared once (a trie of all tokens, with the tokens that any JSON string may contain
/// cut out as slices); a grammar is compiled once and copied for every sequence that uses it. Work is bounded
/// by the size of the schema, of the grammar made from it and of its lexer; what exceeds the bounds is
/// refused, naming `response_format`.
pub struct GrammarCompiler {
    factory: ParserFactory,
    num_tokens: usize,
    compiled: Mutex<VecDeque<(String, Grammar)>>,
}

/// A grammar's state along one sequence.
#[derive(Clone)]
pub struct Grammar {
    matcher: Matcher,
    num_tokens: usize,
}

impl GrammarCompiler {
    /// Prepares a vocabulary. `eos` are the tokens that may end an answer.
    ///
    /// # Errors
    /// [`TextError::Unsupported`] for a model with no such token inside its vocabulary: its answers could not
    /// end. [`TextError::Grammar`] if the vocabulary cannot be prepared.
    pub fn new(tokenizer: &Tokenizer, eos: &[TokenId]) -> Result<Self, TextError> {
        let num_tokens = tokenizer.num_tokens();
        let eos: Vec<u32> = eos.iter().map(|id| id.0).filter(|&id| (id as usize) < num_tokens).collect();
        let Some(&first) = eos.first() else {
            return Err(TextError::unsupported(FIELD, "json", "the model has no end-of-sequence token"));
        };
        let vocab_size = u32::try_from(num_tokens)
            .map_err(|_| TextError::Grammar { reason: format!("{num_tokens} tokens are too many") })?;
        let words: Vec<Vec<u8>> = (0..vocab_size).map(|id| word(tokenizer, TokenId(id))).collect();
        let trie = TokTrie::from(&TokRxInfo::new(vocab_size, first), &words).with_eos_tokens(&eos);
        let environment: TokEnv = Arc::new(Environment { trie });
        let mut factory = ParserFactory::new_simple(&environment).map_err(engine_error)?;
        factory.quiet();
        *factory.limits_mut() = ParserLimits {
            max_items_in_row: 1000,
            initial_lexer_fuel: 500_000,
            step_lexer_fuel: 200_000,
            step_max_items: 50_000,
            max_lexer_states: 50_000,
            max_grammar_size: 100_000,
            precompute_large_lexemes: false,
            verbose_errors: false,
        };
        Ok(Self { factory, num_tokens, compiled: Mutex::default() })
    }

    /// Returns the grammar of a format, at its beginning.
    ///
    /// # Errors
    /// [`TextError::InvalidField`] naming `response_format`, for a schema that is broken, unsatisfiable, uses
    /// a keyword that cannot be enforced, or exceeds a bound.
    pub fn compile(&self, spec: &GrammarSpec) -> Result<Grammar, TextError> {
        let schema = match spec {
            GrammarSpec::JsonObject => json!({ "type": "object" }),
            GrammarSpec::JsonSchema(schema) => checked(schema)?,
        };
        let key = schema.to_string();
        if let Some(grammar) = self.cached(&key) {
            return Ok(grammar);
        }
        let parser = self
            .factory
            .create_parser(TopLevelGrammar::from_json_schema(with_whitespace(schema)))
            .map_err(|error| TextError::invalid(SCHEMA_FIELD, first_line(&format!("{error:#}"))))?;
        let mut matcher = Matcher::new(Ok(parser));
        if let Some(reason) = matcher.get_error() {
            return Err(TextError::invalid(SCHEMA_FIELD, first_line(&reason)));
        }
        if let Some(warning) = matcher.grammar_warnings().into_iter().next() {
            return Err(TextError::invalid(SCHEMA_FIELD, first_line(&warning)));
        }
        let grammar = Grammar { matcher, num_tokens: self.num_tokens };
        let mut compiled = self.compiled.lock().unwrap_or_else(PoisonError::into_inner);
        if compiled.len() == MAX_CACHED {
            compiled.pop_front();
        }
        compiled.push_back((key, grammar.copy()));
        Ok(grammar)
    }

    /// Returns a copy of a grammar compiled before, and keeps it from being forgotten soon.
    fn cached(&self, key: &str) -> Option<Grammar> {
        let mut compiled = self.compiled.lock().unwrap_or_else(PoisonError::into_inner);
        let at = compiled.iter().position(|(other, _)| other == key)?;
        let entry = compiled.remove(at)?;
        let grammar = entry.1.copy();
        compiled.push_back(entry);
        Some(grammar)
    }
}

impl Grammar {
    /// Returns the tokens allowed next, token `t` being bit `t % 32` of word `t / 32`. Does not change the
    /// state. When the answer is complete, these are the tokens that end it.
    ///
    /// # Errors
    /// [`TextError::Grammar`] if a bound was reached or the grammar allows nothing; the sequence cannot go on.
    pub fn mask(&mut self) -> Result<Vec<u32>, TextError> {
        let mask = self.matcher.compute_mask_or_eos().map_err(engine_error)?;
        let mut words = mask.as_slice().to_vec();
        words.resize(self.num_tokens.div_ceil(32), 0);
        Ok(words)
    }

    /// Advances by one token.
    ///
    /// # Errors
    /// [`TextError::Grammar`] if the token was not allowed; the state is then unchanged.
    pub fn accept(&mut self, token: TokenId) -> Result<(), TextError> {
        if self.is_complete() {
            return Err(TextError::Grammar {
                reason: format!("token {token} comes after the end of the answer"),
            });
        }
        if token.0 as usize >= self.num_tokens {
            return Err(TextError::Grammar { reason: format!("token {token} is outside the vocabulary") });
        }
        match self.matcher.try_consume_tokens(&[token.0]).map_err(engine_error)? {
            0 => Err(TextError::Grammar { reason: format!("token {token} is not allowed here") }),
            _ => Ok(()),
        }
    }

    /// Says whether the answer is complete and nothing may follow.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        matches!(
            self.matcher.stop_reason(),
            StopReason::NoExtension | StopReason::NoExtensionBias | StopReason::EndOfSentence
        )
    }

    /// Copies the state with caches of its own, so that sequences do not fill each other's.
    fn copy(&self) -> Self {
        Self { matcher: self.matcher.deep_clone(), num_tokens: self.num_tokens }
    }
}

impl fmt::Debug for GrammarCompiler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GrammarCompiler").field("num_tokens", &self.num_tokens).finish_non_exhaustive()
    }
}

impl fmt::Debug for Grammar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Grammar").field("stop_reason", &self.matcher.stop_reason()).finish_non_exhaustive()
    }
}

/// The vocabulary as the grammar engine wants it.
struct Environment {
    trie: TokTrie,
}

impl TokenizerEnv for Environment {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<u32> {
        self.trie.greedy_tokenize(bytes)
    }

    /// Forces no tokenization: the model chooses among all that spell what the grammar allows. The same
    /// answer is then possible with every vocabulary, and tokens never depend on how the engine would have
    /// cut the text.
    fn tokenize_is_canonical(&self) -> bool {
        false
    }
}

/// Returns a token's entry in the trie: special tokens are marked by a byte that text never has.
fn word(tokenizer: &Tokenizer, token: TokenId) -> Vec<u8> {
    let bytes = match tokenizer.table().kind(token) {
        TokenKind::Text => tokenizer.table().text_bytes(token).to_vec(),
        TokenKind::Special => {
            let name = tokenizer.table().bytes(token).unwrap_or_default();
            [&[TokTrie::SPECIAL_TOKEN_MARKER], name].concat()
        }
        TokenKind::Hole => Vec::new(),
    };
    if bytes.len() > MAX_TOKEN_BYTES { Vec::new() } else { bytes }
}

/// Checks a client's schema against the bounds.
fn checked(schema: &Value) -> Result<Value, TextError> {
    let Value::Object(object) = schema else {
        return Err(TextError::invalid(SCHEMA_FIELD, "must be an object"));
    };
    if depth(schema) > MAX_SCHEMA_DEPTH {
        return Err(TextError::invalid(SCHEMA_FIELD, format!("nested deeper than {MAX_SCHEMA_DEPTH}")));
    }
    let num_bytes = schema.to_string().len();
    if num_bytes > MAX_SCHEMA_BYTES {
        return Err(TextError::invalid(
            SCHEMA_FIELD,
            format!("{num_bytes} bytes, more than {MAX_SCHEMA_BYTES}"),
        ));
    }
    let mut object = object.clone();
    // The engine's own options are not the client's to set.
    object.remove("x-guidance");
    Ok(Value::Object(object))
}

fn depth(value: &Value) -> usize {
    let children: &mut dyn Iterator<Item = &Value> = match value {
        Value::Array(items) => &mut items.iter(),
        Value::Object(entries) => &mut entries.values(),
        _ => return 0,
    };
    1 + children.map(depth).max().unwrap_or(0)
}

fn with_whitespace(mut schema: Value) -> Value {
    schema["x-guidance"] = json!({ "whitespace_pattern": WHITESPACE });
    schema
}

fn engine_error(error: impl ToString) -> TextError {
    TextError::Grammar { reason: first_line(&error.to_string()) }
}

/// Returns the first line: what follows is the engine's inner state.
fn first_line(text: &str) -> String {
    text.lines().next().unwrap_or_default().trim().to_owned()
}

#[cfg(test)]
mod tests;
