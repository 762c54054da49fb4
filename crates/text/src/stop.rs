//! Stop strings, found across the pieces of a stream.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::error::TextError;

/// More stop strings than a request may have.
const MAX_STOPS: usize = 64;
/// Longer than a stop string may be, in bytes.
const MAX_STOP_BYTES: usize = 4096;

/// Finds the first stop string in a stream of text, holding back what may be the beginning of one.
///
/// **The rule.** Read character by character, the text ends as soon as it ends with a stop string; if it then
/// ends with several, the longest counts. The text given out is what stood before that string. The rule looks
/// at characters only, so the result does not depend on how the text was cut into pieces, and never waits for
/// text that a shorter stop string has already made unnecessary: of the stop strings `abcd` and `bc`, the
/// second always wins.
///
/// The machine is Aho and Corasick's ("Efficient string matching", CACM 18(6), 1975) over bytes: its state is
/// the longest end of the text that begins a stop string, which is exactly what must be held back. Stop
/// strings are whole characters, hence so is everything given out.
#[derive(Clone, Debug)]
pub struct StopStrings {
    machine: Arc<Machine>,
    state: usize,
    /// The text that may begin a stop string: as long as the state is deep.
    held: String,
    matched: Option<usize>,
}

/// What a piece of text led to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StopStep {
    /// The text that may be given out.
    pub text: String,
    /// The number of the stop string that ended the text, in the order they were given.
    pub matched: Option<usize>,
}

impl StopStrings {
    /// Builds the matcher; with no stop strings it lets everything through.
    ///
    /// # Errors
    /// [`TextError::InvalidField`] naming `stop`, for an empty or oversized string, or too many of them.
    pub fn new<S: AsRef<str>>(stops: &[S]) -> Result<Self, TextError> {
        if stops.len() > MAX_STOPS {
            return Err(TextError::invalid(
                "stop",
                format!("at most {MAX_STOPS} strings, not {}", stops.len()),
            ));
        }
        for (index, stop) in stops.iter().enumerate() {
            let stop = stop.as_ref();
            let field = if stops.len() == 1 { "stop".to_owned() } else { format!("stop[{index}]") };
            if stop.is_empty() {
                return Err(TextError::invalid(field, "must not be empty"));
            }
            if stop.len() > MAX_STOP_BYTES {
                return Err(TextError::invalid(
                    field,
                    format!("at most {MAX_STOP_BYTES} bytes, not {}", stop.len()),
                ));
            }
        }
        let machine = Arc::new(Machine::new(stops));
        Ok(Self { machine, state: 0, held: String::new(), matched: None })
    }

    /// Adds text and returns what may be given out. After a match, everything is swallowed.
    pub fn push(&mut self, text: &str) -> StopStep {
        if self.matched.is_some() {
            return StopStep { text: String::new(), matched: self.matched };
        }
        let already = self.held.len();
        self.held.push_str(text);
        for index in already..self.held.len() {
            self.state = self.machine.next(self.state, self.held.as_bytes()[index]);
            if let Some(pattern) = self.machine.nodes[self.state].longest {
                self.matched = Some(pattern);
                let mut text = std::mem::take(&mut self.held);
                text.truncate(index + 1 - self.machine.lengths[pattern]);
                return StopStep { text, matched: self.matched };
            }
        }
        let keep = self.machine.nodes[self.state].depth;
        let tail = self.held.split_off(self.held.len() - keep);
        StopStep { text: std::mem::replace(&mut self.held, tail), matched: None }
    }

    /// Adds text in which no stop string counts (a request's `min_tokens`), and returns what may be given
    /// out. A stop string neither ends in this text nor begins in it.
    pub fn pass(&mut self, text: &str) -> String {
        if self.matched.is_some() {
            return String::new();
        }
        self.state = 0;
        let mut out = std::mem::take(&mut self.held);
        out.push_str(text);
        out
    }

    /// Ends the stream and returns what was held back.
    pub fn finish(&mut self) -> String {
        self.state = 0;
        std::mem::take(&mut self.held)
    }

    /// Returns the number of the stop string that ended the text, if one did.
    #[must_use]
    pub fn matched(&self) -> Option<usize> {
        self.matched
    }
}

#[derive(Debug)]
struct Machine {
    nodes: Vec<Node>,
    lengths: Vec<usize>,
}

#[derive(Debug, Default)]
struct Node {
    /// Sorted by byte.
    children: Vec<(u8, usize)>,
    /// The node of the longest proper end of this node's text.
    fallback: usize,
    depth: usize,
    /// The longest stop string this node's text ends with.
    longest: Option<usize>,
}

impl Node {
    fn child(&self, byte: u8) -> Option<usize> {
        let at = self.children.binary_search_by_key(&byte, |&(byte, _)| byte).ok()?;
        Some(self.children[at].1)
    }
}

impl Machine {
    fn new<S: AsRef<str>>(stops: &[S]) -> Self {
        let mut nodes = vec![Node::default()];
        for (pattern, stop) in stops.iter().enumerate() {
            let mut at = 0;
            for &byte in stop.as_ref().as_bytes() {
                at = if let Some(child) = nodes[at].child(byte) {
                    child
                } else {
                    let child = nodes.len();
                    nodes.push(Node { depth: nodes[at].depth + 1, ..Node::default() });
                    let place = nodes[at].children.partition_point(|&(other, _)| other < byte);
                    nodes[at].children.insert(place, (byte, child));
                    child
                };
            }
            // Of equal strings the first counts.
            nodes[at].longest.get_or_insert(pattern);
        }
        let lengths = stops.iter().map(|stop| stop.as_ref().len()).collect();
        let mut machine = Self { nodes, lengths };
        machine.link();
        machine
    }

    /// Fills in the fallbacks, breadth first, so that a shallower node is always done before a deeper one
    /// needs it.
    fn link(&mut self) {
        let mut queue = VecDeque::from([0]);
        while let Some(parent) = queue.pop_front() {
            for (byte, child) in self.nodes[parent].children.clone() {
                let fallback = if parent == 0 { 0 } else { self.next(self.nodes[parent].fallback, byte) };
                self.nodes[child].fallback = fallback;
                self.nodes[child].longest = self.nodes[child].longest.or(self.nodes[fallback].longest);
                queue.push_back(child);
            }
        }
    }

    fn next(&self, mut state: usize, byte: u8) -> usize {
        loop {
            if let Some(child) = self.nodes[state].child(byte) {
                return child;
            }
            if state == 0 {
                return 0;
            }
            state = self.nodes[state].fallback;
        }
    }
}

#[cfg(test)]
mod tests;
