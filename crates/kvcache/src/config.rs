//! How large a cache is, and its bounds.

/// How large a cache is and where its bounds are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvCacheConfig {
    /// Pages in the KV region; at least 1.
    pub num_pages: u32,
    /// Tokens in a page; at least 1.
    pub page_size: u32,
    /// The most pages that the prefix cache may keep for itself; pages in use do not count. All of them by default.
    pub max_cached_pages: u32,
    /// No reservation is made while more pages than this wait for a peer's last write. 5 % of the pages by default, but 16
    /// at least.
    pub max_quarantined_pages: u32,
    /// The most events kept until somebody takes them; 0 records none. 4,096 by default.
    pub max_buffered_events: u32,
}

impl KvCacheConfig {
    /// Makes a configuration with the default bounds.
    #[must_use]
    pub fn new(num_pages: u32, page_size: u32) -> Self {
        Self {
            num_pages,
            page_size,
            max_cached_pages: num_pages,
            max_quarantined_pages: (num_pages / 20).max(16),
            max_buffered_events: 4096,
        }
    }
}
