//! Cases by name: page edges, order of eviction, deduplication, salts, handles that are dropped or foreign.

#![allow(clippy::unwrap_used, reason = "tests may unwrap")]

use expect_test::{Expect, expect};
use microserving_kvcache::{
    KvCache, KvCacheConfig, KvChange, KvError, PageCounts, PageHash, PagePool, PageState, PageTable,
    invariants, page_hashes,
};
use microserving_protocol::{Generation, KvRange, PageId, TokenId};

fn cache(num_pages: u32) -> KvCache {
    KvCache::new(KvCacheConfig::new(num_pages, 4)).unwrap()
}

fn tokens(count: u32) -> Vec<TokenId> {
    (0..count).map(TokenId).collect()
}

/// Runs a whole sequence: match, compute all of it, commit; returns its table and how much was matched.
fn run(cache: &mut KvCache, salt: &str, prompt: &[TokenId]) -> (PageTable, u32) {
    let limit = prompt.len().saturating_sub(1);
    let prefix = cache.match_prefix(salt, &prompt[..limit]);
    let matched = prefix.num_tokens();
    let mut table = prefix.into_table();
    cache.grow(&mut table, u32::try_from(prompt.len()).unwrap()).unwrap();
    drop(cache.commit(&mut table, prompt).unwrap());
    (table, matched)
}

fn store(cache: &mut KvCache, prompt: &[TokenId]) {
    let (table, _) = run(cache, "", prompt);
    cache.release_table(table);
}

fn counts(cache: &KvCache) -> String {
    let PageCounts { free, reserved, owned, cached, quarantined, total } = cache.counts();
    format!(
        "{free} free {reserved} reserved {owned} owned {cached} cached {quarantined} quarantined of {total}"
    )
}

/// One line a prompt length: what the first request leaves, and what the second one, equal to it, finds.
fn check_lengths(lengths: &[u32], expected: &Expect) {
    let mut lines = String::new();
    for length in lengths {
        let mut cache = cache(8);
        let prompt = tokens(*length);
        let (table, _) = run(&mut cache, "", &prompt);
        let (pages, shared) = (table.pages().len(), table.num_shared_tokens());
        cache.release_table(table);
        let cached = cache.counts().cached;
        let (again, matched) = run(&mut cache, "", &prompt);
        lines +=
            &format!("{length}: {pages} pages, {shared} shared, {cached} cached, then {matched} matched\n");
        cache.release_table(again);
        invariants::check_idle(&mut cache).unwrap();
    }
    expected.assert_eq(&lines);
}

#[test]
fn only_full_pages_are_shared_and_the_last_token_is_never_matched() {
    check_lengths(
        &[0, 1, 3, 4, 5, 7, 8, 9],
        &expect![[r#"
            0: 0 pages, 0 shared, 0 cached, then 0 matched
            1: 1 pages, 0 shared, 0 cached, then 0 matched
            3: 1 pages, 0 shared, 0 cached, then 0 matched
            4: 1 pages, 4 shared, 1 cached, then 0 matched
            5: 2 pages, 4 shared, 1 cached, then 4 matched
            7: 2 pages, 4 shared, 1 cached, then 4 matched
            8: 2 pages, 8 shared, 2 cached, then 4 matched
            9: 3 pages, 8 shared, 2 cached, then 8 matched
        "#]],
    );
}

/// One line an end: what is to be received and what is promised for it, with one page cached.
#[test]
fn reservations_begin_at_a_page_and_end_anywhere() {
    let mut lines = String::new();
    for end in [0, 1, 3, 4, 5, 7, 8, 9] {
        for extra in [0, 1, 4] {
            let mut cache = cache(8);
            store(&mut cache, &tokens(4));
            let reservation = cache.reserve("", &tokens(end), extra).unwrap();
            let receiving = reservation.receiving_pages().len();
            let range = reservation.range();
            lines += &format!("{end}+{extra}: {range} in {receiving}, {}\n", counts(&cache));
            assert_eq!(cache.quarantine(reservation) as usize, receiving);
            // Room behind the range was never shown to anybody.
            assert_eq!(cache.counts().quarantined as usize, receiving);
            assert_eq!(cache.drained(Generation(1)).is_ok(), receiving > 0);
            invariants::check_idle(&mut cache).unwrap();
        }
    }
    expect![[r#"
        0+0: [0, 0) in 0, 7 free 0 reserved 0 owned 1 cached 0 quarantined of 8
        0+1: [0, 0) in 0, 6 free 1 reserved 0 owned 1 cached 0 quarantined of 8
        0+4: [0, 0) in 0, 6 free 1 reserved 0 owned 1 cached 0 quarantined of 8
        1+0: [0, 1) in 1, 6 free 1 reserved 0 owned 1 cached 0 quarantined of 8
        1+1: [0, 1) in 1, 6 free 1 reserved 0 owned 1 cached 0 quarantined of 8
        1+4: [0, 1) in 1, 5 free 2 reserved 0 owned 1 cached 0 quarantined of 8
        3+0: [0, 3) in 1, 6 free 1 reserved 0 owned 1 cached 0 quarantined of 8
        3+1: [0, 3) in 1, 6 free 1 reserved 0 owned 1 cached 0 quarantined of 8
        3+4: [0, 3) in 1, 5 free 2 reserved 0 owned 1 cached 0 quarantined of 8
        4+0: [4, 4) in 0, 7 free 0 reserved 1 owned 0 cached 0 quarantined of 8
        4+1: [4, 4) in 0, 6 free 1 reserved 1 owned 0 cached 0 quarantined of 8
        4+4: [4, 4) in 0, 6 free 1 reserved 1 owned 0 cached 0 quarantined of 8
        5+0: [4, 5) in 1, 6 free 1 reserved 1 owned 0 cached 0 quarantined of 8
        5+1: [4, 5) in 1, 6 free 1 reserved 1 owned 0 cached 0 quarantined of 8
        5+4: [4, 5) in 1, 5 free 2 reserved 1 owned 0 cached 0 quarantined of 8
        7+0: [4, 7) in 1, 6 free 1 reserved 1 owned 0 cached 0 quarantined of 8
        7+1: [4, 7) in 1, 6 free 1 reserved 1 owned 0 cached 0 quarantined of 8
        7+4: [4, 7) in 1, 5 free 2 reserved 1 owned 0 cached 0 quarantined of 8
        8+0: [4, 8) in 1, 6 free 1 reserved 1 owned 0 cached 0 quarantined of 8
        8+1: [4, 8) in 1, 5 free 2 reserved 1 owned 0 cached 0 quarantined of 8
        8+4: [4, 8) in 1, 5 free 2 reserved 1 owned 0 cached 0 quarantined of 8
        9+0: [4, 9) in 2, 5 free 2 reserved 1 owned 0 cached 0 quarantined of 8
        9+1: [4, 9) in 2, 5 free 2 reserved 1 owned 0 cached 0 quarantined of 8
        9+4: [4, 9) in 2, 4 free 3 reserved 1 owned 0 cached 0 quarantined of 8
    "#]]
    .assert_eq(&lines);
}

#[test]
fn a_received_range_is_matchable_only_after_it_was_committed() {
    let mut cache = cache(8);
    let prompt = tokens(9);
    let reservation = cache.reserve("", &prompt[..8], 1).unwrap();
    assert_eq!(reservation.range(), KvRange::new(0, 8).unwrap());
    assert_eq!(cache.peek_prefix("", &prompt), 0);
    let mut table = cache.accept(reservation).unwrap();
    assert_eq!((cache.peek_prefix("", &prompt), table.capacity(), table.num_shared_tokens()), (0, 12, 0));
    let committed = cache.commit(&mut table, &prompt).unwrap();
    assert_eq!((committed.num_shared_tokens, committed.num_new_pages), (8, 2));
    assert_eq!(cache.peek_prefix("", &prompt), 8);
    drop(committed);
    cache.release_table(table);
    invariants::check_idle(&mut cache).unwrap();
}

#[test]
fn the_longest_unused_context_is_evicted_first_from_its_end() {
    let mut cache = cache(6);
    let context = |name: u32| [vec![TokenId(100 + name); 8], tokens(1)].concat();
    for name in 0..3 {
        store(&mut cache, &context(name));
    }
    // Looked at without being used, and used.
    assert_eq!(cache.peek_prefix("", &context(1)), 8);
    let used = cache.match_prefix("", &context(0)[..8]);
    cache.release(used);
    let mut left = String::new();
    let mut table = cache.match_prefix("other", &[]).into_table();
    for grown in 1..=6 {
        cache.grow(&mut table, grown * 4).unwrap();
        let matched: Vec<_> = (0..3).map(|name| cache.peek_prefix("", &context(name))).collect();
        left += &format!("{matched:?}\n");
    }
    expect![[r#"
        [4, 8, 8]
        [4, 4, 8]
        [4, 0, 8]
        [4, 0, 4]
        [4, 0, 0]
        [0, 0, 0]
    "#]]
    .assert_eq(&left);
}

#[test]
fn what_is_held_is_not_evicted_and_a_refusal_evicts_nothing() {
    let mut cache = cache(4);
    store(&mut cache, &tokens(9));
    let held = cache.match_prefix("", &tokens(5));
    let mut table = cache.match_prefix("", &[]).into_table();
    let no_room = KvError::NoRoom { needed: 4, free: 2, evictable: 1 };
    assert_eq!(cache.grow(&mut table, 13), Err(no_room.clone()));
    assert_eq!(cache.reserve("x", &tokens(13), 0).map(drop), Err(no_room));
    assert_eq!((table.capacity(), cache.peek_prefix("", &tokens(9))), (0, 8));
    assert_eq!(cache.grow(&mut table, 12), Ok(3));
    assert_eq!(cache.peek_prefix("", &tokens(9)), 4);
    assert_eq!(held.num_tokens(), 4);
    assert_eq!(cache.grow(&mut table, 12), Ok(0));
}

#[test]
fn an_equal_page_is_dropped_for_the_one_that_is_cached() {
    let mut cache = cache(8);
    let prompt = tokens(9);
    let mut tables: Vec<PageTable> = (0..2)
        .map(|_| {
            let mut table = cache.match_prefix("", &prompt[..8]).into_table();
            cache.grow(&mut table, 9).unwrap();
            table
        })
        .collect();
    drop(cache.commit(&mut tables[0], &prompt).unwrap());
    let own = tables[1].pages().to_vec();
    let committed = cache.commit(&mut tables[1], &prompt).unwrap();
    let replaced: Vec<_> = committed.replaced.iter().collect();
    let first = tables[0].pages();
    assert_eq!(replaced, [(0, own[0], first[0]), (1, own[1], first[1])]);
    assert_eq!(tables[1].pages(), [first[0], first[1], own[2]]);
    // Until it is dropped the old pages stay as they are, for whoever still sends them.
    assert_eq!(counts(&cache), "2 free 0 reserved 6 owned 0 cached 0 quarantined of 8");
    drop(committed);
    cache.collect();
    assert_eq!(counts(&cache), "4 free 0 reserved 4 owned 0 cached 0 quarantined of 8");
    assert_eq!(cache.stats().deduplicated_pages, 2);
    invariants::check(&cache).unwrap();
}

#[test]
fn salts_never_mix() {
    let mut cache = cache(8);
    let prompt = tokens(9);
    let (alice, _) = run(&mut cache, "alice", &prompt);
    let (bob, matched) = run(&mut cache, "bob", &prompt);
    assert_eq!(matched, 0);
    assert!(alice.pages().iter().all(|page| !bob.pages().contains(page)));
    assert_eq!(cache.prefixes().num_tenants(), 2);
    let (again, matched) = run(&mut cache, "alice", &prompt);
    assert_eq!((matched, &again.pages()[..2]), (8, &alice.pages()[..2]));
    assert_eq!(cache.peek_prefix("", &prompt), 0);
}

#[test]
fn tenants_of_whom_nothing_is_left_are_forgotten() {
    let mut cache = cache(2);
    for tenant in 0..100 {
        let (table, _) = run(&mut cache, &format!("tenant {tenant}"), &tokens(5));
        cache.release_table(table);
    }
    assert!(cache.prefixes().num_tenants() <= 2);
    let empty = cache.match_prefix("looked up only", &tokens(5));
    cache.release(empty);
    cache.clear_unused();
    assert_eq!((cache.prefixes().num_tenants(), cache.prefixes().num_nodes()), (0, 0));
}

#[test]
fn the_cache_keeps_to_its_own_bound() {
    let config = KvCacheConfig { max_cached_pages: 3, ..KvCacheConfig::new(16, 4) };
    let mut cache = KvCache::new(config).unwrap();
    store(&mut cache, &tokens(25));
    assert_eq!(counts(&cache), "13 free 0 reserved 0 owned 3 cached 0 quarantined of 16");
    assert_eq!(cache.peek_prefix("", &tokens(25)), 12, "the beginning is what is kept");
    assert_eq!(cache.stats().evicted_pages, 3);
}

#[test]
fn dropped_handles_find_their_way_back() {
    let mut cache = cache(16);
    store(&mut cache, &tokens(9));
    let prefix = cache.match_prefix("", &tokens(9));
    let (table, _) = run(&mut cache, "", &tokens(14));
    let reservation = cache.reserve("", &[tokens(8), tokens(6)].concat(), 8).unwrap();
    assert_eq!(counts(&cache), "8 free 4 reserved 4 owned 0 cached 0 quarantined of 16");
    drop((prefix, table));
    // Dropped in a hurry, as it may be while something else fails: what a peer may write to is not freed.
    drop(reservation);
    cache.collect();
    assert_eq!(counts(&cache), "11 free 0 reserved 0 owned 3 cached 2 quarantined of 16");
}

#[test]
fn a_quarantine_ends_once_and_under_its_own_generation() {
    let mut cache = cache(16);
    let first = cache.reserve("", &tokens(8), 0).unwrap();
    let second = cache.reserve("", &tokens(4), 0).unwrap();
    let (one, two) = (first.generation(), second.generation());
    assert!(one < two);
    assert_eq!(cache.drained(one), Err(KvError::NotQuarantined { generation: one }), "it is only reserved");
    assert_eq!(cache.quarantine(first), 2);
    assert_eq!(cache.drained(two), Err(KvError::NotQuarantined { generation: two }));
    assert_eq!(cache.drained(one), Ok(2));
    assert_eq!(cache.drained(one), Err(KvError::NotQuarantined { generation: one }));
    cache.cancel(second).unwrap();
    assert!(cache.reserve("", &tokens(4), 0).unwrap().generation() > two);
}

#[test]
fn a_full_quarantine_refuses_reservations_until_something_is_drained() {
    let config = KvCacheConfig { max_quarantined_pages: 1, ..KvCacheConfig::new(16, 4) };
    let mut cache = KvCache::new(config).unwrap();
    let reservation = cache.reserve("", &tokens(8), 0).unwrap();
    let generation = reservation.generation();
    cache.quarantine(reservation);
    let full = KvError::QuarantineFull { quarantined: 2, limit: 1 };
    assert_eq!(cache.reserve("", &tokens(1), 0).map(drop), Err(full));
    // Local work goes on.
    assert!(cache.can_allocate(14));
    cache.drained(generation).unwrap();
    assert!(cache.reserve("", &tokens(1), 0).is_ok());
}

#[test]
fn handles_of_another_cache_are_refused_and_go_home() {
    let mut here = cache(8);
    let mut there = cache(8);
    let (mut table, _) = run(&mut there, "", &tokens(5));
    assert_eq!(here.grow(&mut table, 20), Err(KvError::ForeignHandle));
    assert_eq!(here.commit(&mut table, &tokens(5)).map(drop), Err(KvError::ForeignHandle));
    assert_eq!(here.fork(&table, 5).map(drop), Err(KvError::ForeignHandle));
    here.release_table(table);
    let accepted = there.reserve("", &tokens(20), 0).unwrap();
    assert_eq!(here.accept(accepted).map(drop), Err(KvError::ForeignHandle));
    let cancelled = there.reserve("", &tokens(8), 0).unwrap();
    assert_eq!(here.cancel(cancelled), Err(KvError::ForeignHandle));
    assert_eq!(here.counts().free, 8);
    there.collect();
    assert_eq!(counts(&there), "2 free 0 reserved 0 owned 1 cached 5 quarantined of 8");
}

#[test]
fn a_handle_may_outlive_its_cache() {
    let mut short = cache(8);
    let (table, _) = run(&mut short, "", &tokens(5));
    drop(short);
    drop(table);
}

#[test]
fn a_fork_copies_at_most_one_page_after_a_commit() {
    let mut cache = cache(16);
    let (table, _) = run(&mut cache, "", &tokens(10));
    let fork = cache.fork(&table, 10).unwrap();
    assert_eq!(fork.table.pages()[..2], table.pages()[..2]);
    let copies: Vec<_> = fork.copies.iter().map(|copy| (copy.from, copy.to, copy.num_slots)).collect();
    assert_eq!(copies, [(table.pages()[2], fork.table.pages()[2], 2)]);
    let exact = cache.fork(&table, 8).unwrap();
    assert!(exact.copies.is_empty());
    let below = KvError::OutOfRange { field: "num_tokens", value: 7, min: 8, max: 12 };
    assert_eq!(cache.fork(&table, 7).map(drop), Err(below));
    invariants::check(&cache).unwrap();
}

#[test]
fn commits_continue_what_was_committed() {
    let mut cache = cache(8);
    let (mut table, _) = run(&mut cache, "", &tokens(8));
    cache.grow(&mut table, 12).unwrap();
    let mut other = tokens(12);
    other[7] = TokenId(99);
    assert_eq!(cache.commit(&mut table, &other).map(drop), Err(KvError::TokensDiffer { position: 8 }));
    let long = KvError::OutOfRange { field: "written", value: 13, min: 0, max: 12 };
    assert_eq!(cache.commit(&mut table, &tokens(13)).map(drop), Err(long));
    // Less than before is no news.
    assert_eq!(cache.commit(&mut table, &tokens(3)).unwrap().num_shared_tokens, 8);
    assert_eq!(cache.commit(&mut table, &tokens(12)).unwrap().num_new_pages, 1);
    invariants::check(&cache).unwrap();
}

#[test]
fn sizes_that_make_no_sense_are_refused_by_name() {
    let refused = |config| KvCache::new(config).unwrap_err().to_string();
    assert_eq!(refused(KvCacheConfig::new(0, 4)), "num_pages is 0, it must be at least 1");
    assert_eq!(refused(KvCacheConfig::new(4, 0)), "page_size is 0, it must be at least 1");
    assert_eq!(
        refused(KvCacheConfig::new(1 << 30, 16)),
        "num_pages is 1073741824, it must be less than 2^32 tokens"
    );
    let mut cache = cache(4);
    let huge = cache.reserve("", &tokens(1), u32::MAX).map(drop).unwrap_err().to_string();
    assert_eq!(huge, "extra_tokens is 4294967296, it must be in [0, 4294967295]");
}

#[test]
fn events_tell_chains_and_evictions() {
    let mut cache = cache(3);
    let prompt = tokens(9);
    let names = page_hashes("", &prompt, 4);
    store(&mut cache, &prompt);
    store(&mut cache, &[tokens(4), vec![TokenId(50); 4]].concat());
    let changes: Vec<_> = cache.take_events().into_iter().map(|event| event.change).collect();
    let other = page_hashes("", &[tokens(4), vec![TokenId(50); 4]].concat(), 4)[1];
    assert_eq!(
        changes,
        [
            KvChange::Stored { parent: PageHash::root(""), pages: names.clone() },
            KvChange::Stored { parent: names[0], pages: vec![other] },
        ]
    );
    assert_eq!(cache.snapshot().next_seq, 2);
    let mut table = cache.match_prefix("", &[]).into_table();
    cache.grow(&mut table, 4).unwrap();
    let events = cache.take_events();
    assert_eq!((events[0].seq, &events[0].change), (2, &KvChange::Removed { pages: vec![names[1]] }));
    cache.clear_unused();
    assert_eq!(cache.take_events()[0].change, KvChange::Cleared);
    assert!(cache.snapshot().pages.is_empty());
}

/// Every move of the pool from every state: allowed ones are listed, all others are errors and change nothing.
#[test]
fn the_pool_makes_only_the_moves_drawn() {
    type Move = fn(&mut PagePool, PageId) -> Result<(), KvError>;
    type Prepare = fn(&mut PagePool);
    const OURS: Generation = Generation(1);
    const THEIRS: Generation = Generation(2);
    let moves: [(&str, Move); 10] = [
        ("accept", |pool, page| pool.accept(page, OURS)),
        ("accept theirs", |pool, page| pool.accept(page, THEIRS)),
        ("cancel", |pool, page| pool.cancel(page, OURS)),
        ("quarantine", |pool, page| pool.quarantine(page, OURS)),
        ("drain", |pool, page| pool.drain(page, OURS)),
        ("drain theirs", |pool, page| pool.drain(page, THEIRS)),
        ("share", PagePool::share),
        ("release", |pool, page| pool.release(page, false)),
        ("release, keep", |pool, page| pool.release(page, true)),
        ("evict", PagePool::evict),
    ];
    let page = PageId(0);
    let states: [(&str, Prepare); 6] = [
        ("free", |_| ()),
        ("reserved", |pool| assert!(pool.promise(OURS).is_some())),
        ("owned", |pool| assert!(pool.take().is_some())),
        ("shared", |pool| {
            pool.take().unwrap();
            pool.share(PageId(0)).unwrap();
        }),
        ("cached", |pool| {
            pool.take().unwrap();
            pool.release(PageId(0), true).unwrap();
        }),
        ("quarantined", |pool| {
            pool.promise(OURS).unwrap();
            pool.quarantine(PageId(0), OURS).unwrap();
        }),
    ];
    let mut lines = String::new();
    for (from, prepare) in states {
        for (name, apply) in moves {
            let mut pool = PagePool::new(1);
            prepare(&mut pool);
            let before = pool.counts();
            if apply(&mut pool, page).is_ok() {
                lines += &format!("{from}: {name} -> {:?}\n", pool.state(page).unwrap());
            } else {
                assert_eq!(pool.counts(), before);
            }
            assert_eq!(pool.counts(), PageCounts::count(pool.states().iter().copied()));
            assert_eq!(pool.free_pages().is_empty(), pool.state(page) != Some(PageState::Free));
            assert!(apply(&mut pool, PageId(1)).is_err(), "there is no such page");
        }
    }
    expect![[r#"
        reserved: accept -> Owned { refs: 1 }
        reserved: cancel -> Free
        reserved: quarantine -> Quarantined(Generation(1))
        owned: share -> Owned { refs: 2 }
        owned: release -> Free
        owned: release, keep -> Cached
        shared: share -> Owned { refs: 3 }
        shared: release -> Owned { refs: 1 }
        shared: release, keep -> Owned { refs: 1 }
        cached: share -> Owned { refs: 1 }
        cached: evict -> Free
        quarantined: drain -> Free
    "#]]
    .assert_eq(&lines);
}
