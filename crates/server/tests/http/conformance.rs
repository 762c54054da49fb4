//! Replays what MLC-LLM's own Router sends, as recorded, and compares statuses, content types and shapes.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde_json::{Value, json};

use crate::support::{Settings, completion, over, two};
use crate::wires::Wire;

over_both_wires!(the_recorded_flows_answer_in_the_recorded_shape);

fn fixtures() -> Option<PathBuf> {
    match std::env::var_os("MICROSERVING_FIXTURES") {
        Some(folder) => Some(PathBuf::from(folder).join("conformance/mlc_router_exchanges.jsonl")),
        None => {
            assert!(std::env::var_os("MICROSERVING_FULL").is_none(), "MICROSERVING_FIXTURES is not set");
            eprintln!(
                "SKIPPED: MICROSERVING_FIXTURES is not set, so there are no recorded exchanges to replay"
            );
            None
        }
    }
}

async fn the_recorded_flows_answer_in_the_recorded_shape(wire: Wire) {
    let Some(path) = fixtures() else { return };
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let mut flows: BTreeMap<String, Vec<Value>> = BTreeMap::new();
    for line in text.lines() {
        let row: Value = serde_json::from_str(line).unwrap();
        flows.entry(row["flow"].as_str().unwrap().to_owned()).or_default().push(row);
    }
    assert!(!flows.is_empty());
    let mut exchanges = 0;
    for (flow, mut rows) in flows {
        rows.sort_by_key(|row| row["seq"].as_u64());
        // A page of 5 tokens lets the recorded match of 10 tokens be a match here.
        let (p, d) = two(&Settings { page_size: 5, ..over(wire) }).await;
        let matched = rows.iter().filter_map(|row| {
            let response: Value = serde_json::from_str(row["response"].as_str()?).ok()?;
            response["prefix_matched_length"].as_u64()
        });
        let matched = matched.max().unwrap_or(0) as usize;
        if matched > 0 {
            let prompt: Vec<u32> = serde_json::from_value(rows[0]["request"]["prompt"].clone()).unwrap();
            d.call("/v1/completions", &completion(&prompt[..matched], 1)).await;
        }
        let mut address = Value::Null;
        for row in &rows {
            let case = format!("{flow} {} {}", row["seq"], row["path"]);
            let mut body = row["request"].clone();
            if body.get("kv_addr_info").is_some() {
                body["kv_addr_info"] = address.clone();
            }
            let node = if row["engine"] == "P" { &p } else { &d };
            let answer = node.post(row["path"].as_str().unwrap(), &body).await;
            assert_eq!(answer.status, row["status"], "{case}: {}", answer.body);
            assert_eq!(answer.header("content-type"), row["content_type"], "{case}");
            let recorded = row["response"].as_str().unwrap();
            if recorded.starts_with("data: ") {
                compare_streams(&case, recorded, &answer.body);
                let keyed = row["path"] == "/microserving/start_generate";
                let id = &answer.events()[0]["id"];
                assert!(!keyed || *id == *flow, "{case}: the key comes back as the id");
            } else {
                let recorded: Value = serde_json::from_str(recorded).unwrap();
                let given = answer.json();
                compare(&case, &recorded, &given);
                if let Some(new) = given.get("kv_append_metadata") {
                    address = new.clone();
                    assert_eq!(given["prefix_matched_length"], recorded["prefix_matched_length"], "{case}");
                }
            }
            exchanges += 1;
        }
        p.wait_idle().await;
        d.wait_idle().await;
    }
    assert!(exchanges >= 37, "{exchanges}");
}

fn compare_streams(case: &str, recorded: &str, given: &str) {
    assert!(given.ends_with("data: [DONE]\n\n"), "{case}: {given}");
    let parse = |text: &str| -> Vec<Value> {
        // Recordings of clients that went away are cut anywhere.
        let whole = &text[..text.rfind("\n\n").unwrap() + 2];
        let blocks = whole.split_terminator("\n\n").filter(|block| *block != "data: [DONE]");
        // Exactly what the Router does: six bytes off every line that is not empty.
        blocks.map(|block| serde_json::from_str(&block[6..]).unwrap()).collect()
    };
    let (recorded, given) = (parse(recorded), parse(given));
    let with_choices = |events: &[Value]| events.iter().any(|event| event["choices"] == json!([]));
    assert_eq!(with_choices(&recorded), with_choices(&given), "{case}: a usage chunk or none");
    for event in &given {
        let usage_only = event["choices"] == json!([]);
        let like = recorded.iter().find(|other| (other["choices"] == json!([])) == usage_only).unwrap();
        compare(case, like, event);
    }
    let finished = |events: &[Value]| {
        let choices = events.iter().filter_map(|event| event["choices"].get(0));
        choices.filter(|choice| !choice["finish_reason"].is_null()).count()
    };
    assert_eq!(finished(&given), 1, "{case}");
}

/// Every recorded key is there, with a value of the recorded type; null stands for any type, and we may say more.
fn compare(case: &str, recorded: &Value, given: &Value) {
    match (recorded, given) {
        (Value::Object(recorded), Value::Object(given)) => {
            for (key, value) in recorded {
                // Figures of MLC's own engine.
                if key == "extra" {
                    continue;
                }
                let found = given.get(key).unwrap_or_else(|| panic!("{case}: no {key} in {given:?}"));
                compare(&format!("{case}.{key}"), value, found);
            }
        }
        (Value::Array(recorded), Value::Array(given)) => {
            for (value, found) in recorded.iter().zip(given) {
                compare(case, value, found);
            }
        }
        (Value::Null, _) | (_, Value::Null) => {}
        (recorded, given) => {
            let same = std::mem::discriminant(recorded) == std::mem::discriminant(given);
            assert!(same, "{case}: recorded {recorded}, given {given}");
        }
    }
}
