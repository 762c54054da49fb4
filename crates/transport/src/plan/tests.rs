use microserving_protocol::{KvDtype, KvLayout};
use proptest::prelude::*;

use super::*;

fn geometry(page_size: u32, num_layers: u32, num_kv_heads: u32, num_pages: u32) -> KvGeometry {
    KvGeometry {
        layout: KvLayout {
            page_size,
            num_layers,
            num_kv_heads,
            head_dim: 2,
            dtype: KvDtype::F16,
            model_hash: 1,
            numeric_mode: "plain".into(),
            tp_rank: 0,
            tp_size: 1,
        },
        num_pages,
    }
}

fn range(begin: u32, end: u32) -> KvRange {
    KvRange::new(begin, end).expect("ordered")
}

fn pages(numbers: &[u32]) -> Vec<PageId> {
    numbers.iter().copied().map(PageId).collect()
}

/// Every byte of a region, numbered so that no two slots of it look alike.
fn numbered(geometry: &KvGeometry, salt: u8) -> Vec<u8> {
    (0..geometry.region_bytes()).map(|i| (i * 31 + i / 251) as u8 ^ salt).collect()
}

#[test]
fn whole_neighbouring_pages_are_one_run() {
    let (local, remote) = (geometry(4, 2, 3, 8), geometry(4, 2, 3, 20));
    let runs = plan_layer(
        &local,
        &pages(&[1, 2, 3, 7]),
        &remote,
        &pages(&[10, 11, 12]),
        1,
        LayerId(1),
        range(4, 16),
    )
    .expect("a good plan");
    let page = local.layout.page_bytes();
    assert_eq!(
        runs,
        [
            PutRun { local_offset: (8 + 2) * page, remote_offset: (20 + 10) * page, num_bytes: 2 * page },
            PutRun { local_offset: (8 + 7) * page, remote_offset: (20 + 12) * page, num_bytes: page },
        ]
    );
}

#[test]
fn bad_lists_are_named() {
    let g = geometry(4, 2, 1, 8);
    let other = geometry(8, 2, 1, 8);
    let plan = |remote: &KvGeometry, local_pages: &[u32], remote_pages: &[u32], first, layer, r| {
        plan_layer(&g, &pages(local_pages), remote, &pages(remote_pages), first, LayerId(layer), r)
            .unwrap_err()
    };
    assert_eq!(plan(&other, &[0], &[0], 0, 0, range(0, 4)), PlanError::ShapesDiffer);
    assert!(matches!(plan(&g, &[0], &[0], 0, 2, range(0, 4)), PlanError::NoSuchLayer { .. }));
    assert_eq!(
        plan(&g, &[0], &[0, 1], 0, 0, range(2, 5)).to_string(),
        "range [2, 5) needs page 1 of the local sequence, which is not in the list"
    );
    assert!(matches!(
        plan(&g, &[0, 1], &[0], 1, 0, range(0, 8)),
        PlanError::PageMissing { index: 0, side: Side::Remote, .. }
    ));
    assert!(matches!(
        plan(&g, &[0], &[8], 0, 0, range(0, 4)),
        PlanError::NoSuchPage { page: PageId(8), side: Side::Remote, .. }
    ));
    assert!(matches!(grant_runs(&g, &pages(&[9]), 0, range(0, 1)), Err(PlanError::NoSuchPage { .. })));
    assert!(matches!(grant_runs(&g, &pages(&[1]), 2, range(0, 9)), Err(PlanError::PageMissing { .. })));
}

#[test]
fn an_empty_range_needs_nothing() {
    let g = geometry(4, 2, 1, 8);
    assert_eq!(plan_layer(&g, &[], &g, &[], 0, LayerId(0), range(3, 3)), Ok(Vec::new()));
    assert_eq!(grant_runs(&g, &[], 0, range(3, 3)), Ok(Vec::new()));
}

/// A shuffled choice of distinct pages.
fn some_pages(num_pages: u32, count: usize) -> impl Strategy<Value = Vec<PageId>> {
    Just((0..num_pages).map(PageId).collect::<Vec<_>>()).prop_shuffle().prop_map(move |mut all| {
        all.truncate(count);
        all
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Applying the plans of all layers copies exactly the slots of the range, and the grant allows exactly those bytes.
    #[test]
    fn exactly_the_range_is_copied(
        page_size in 1u32..6,
        num_kv_heads in 1u32..4,
        local_pages in some_pages(12, 9),
        remote_pages in some_pages(17, 9),
        first_page in 0u32..4,
        a in 0u32..40,
        b in 0u32..40,
    ) {
        let (local, remote) = (geometry(page_size, 2, num_kv_heads, 12), geometry(page_size, 2, num_kv_heads, 17));
        let limit = |n: u32| (n % (page_size * 9 + 1)).max(first_page * page_size);
        let range = range(limit(a.min(b)).min(limit(a.max(b))), limit(a.max(b)).max(limit(a.min(b))));
        let remote_pages = &remote_pages[..9 - first_page as usize];
        let source = numbered(&local, 0);
        let before = numbered(&remote, 0xff);
        let mut after = before.clone();
        let mut put_bytes = Vec::new();
        for layer in (0..2).map(LayerId) {
            for run in plan_layer(&local, &local_pages, &remote, remote_pages, first_page, layer, range).expect("good") {
                after[run.remote_offset..run.remote_offset + run.num_bytes]
                    .copy_from_slice(&source[run.local_offset..run.local_offset + run.num_bytes]);
                put_bytes.extend(run.remote_offset..run.remote_offset + run.num_bytes);
            }
        }

        let mut expected = before;
        let slot_bytes = local.layout.slot_bytes();
        for at in range.begin()..range.end() {
            let (page, slot) = ((at / page_size) as usize, at % page_size);
            for layer in (0..2).map(LayerId) {
                for kv in 0..2 {
                    for head in 0..num_kv_heads {
                        let from = local.slot_offset(layer, local_pages[page], kv, head, slot);
                        let to = remote.slot_offset(layer, remote_pages[page - first_page as usize], kv, head, slot);
                        expected[to..to + slot_bytes].copy_from_slice(&source[from..from + slot_bytes]);
                    }
                }
            }
        }
        prop_assert_eq!(after, expected);

        put_bytes.sort_unstable();
        let granted = grant_runs(&remote, remote_pages, first_page, range).expect("good");
        prop_assert!(granted.windows(2).all(|w| w[0].offset + w[0].num_bytes < w[1].offset));
        let granted: Vec<usize> = granted.iter().flat_map(|r| r.offset..r.offset + r.num_bytes).collect();
        prop_assert_eq!(put_bytes, granted, "each granted byte is written once");
        let total = range.num_tokens() as usize * local.layout.token_bytes();
        prop_assert_eq!(
            grant_runs(&remote, remote_pages, first_page, range).expect("good").iter().map(|r| r.num_bytes).sum::<usize>(),
            total
        );
    }
}
