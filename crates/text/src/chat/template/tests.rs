use serde_json::{Value as Json, json};

use super::*;
use crate::bundle::TextBundle;
use crate::testing::asset;

fn render(source: &str, messages: &Json) -> Result<String, TextError> {
    let template = ChatTemplate::new(source, Some("<s>"), Some("</s>"))?;
    template.render(
        messages.as_array().unwrap(),
        &ChatOptions { add_generation_prompt: true, ..ChatOptions::default() },
    )
}

fn user(content: &str) -> Json {
    json!([{ "role": "user", "content": content }])
}

#[track_caller]
fn check(source: &str, messages: &Json, expected: &str) {
    assert_eq!(render(source, messages).unwrap(), expected);
}

/// Checks an expression over `x`, the content of the only message.
#[track_caller]
fn check_expression(expression: &str, x: &str, expected: &str) {
    check(&format!("{{%- set x = messages[0]['content'] -%}}{{{{ {expression} }}}}"), &user(x), expected);
}

#[test]
fn blocks_leave_no_trace_of_their_lines() {
    let source = "{{ bos_token }}{% for message in messages %}\n    {% if message['role'] == 'user' %}\n[{{ message['content'] }}]\n    {% endif %}\n{% endfor %}\n{%- if add_generation_prompt %}\n>{% endif %}\n";
    check(source, &user("hi"), "<s>[hi]\n>");
}

#[test]
fn contents_in_parts_are_joined_and_other_kinds_refused_by_name() {
    let parts = json!([{ "role": "user", "content": [{ "type": "text", "text": "a" }, { "type": "text", "text": "b" }] }]);
    check("{{ messages[0].content }}", &parts, "ab");
    let refused = |messages: Json, field: &str| {
        let error = render("x", &messages).unwrap_err();
        assert_eq!(error.field(), Some(field), "{error}");
    };
    refused(json!([]), "messages");
    refused(json!(["hi"]), "messages[0]");
    refused(json!([{ "content": "hi" }]), "messages[0].role");
    refused(json!([{ "role": 3, "content": "hi" }]), "messages[0].role");
    refused(json!([{ "role": "user" }]), "messages[0].content");
    refused(json!([{ "role": "user", "content": null }]), "messages[0].content");
    refused(json!([{ "role": "user", "content": 7 }]), "messages[0].content");
    let ok = json!({ "role": "user", "content": "hi" });
    refused(
        json!([ok, { "role": "user", "content": [{ "type": "text", "text": "a" }, { "type": "image_url", "image_url": {} }] }]),
        "messages[1].content[1].type",
    );
    refused(json!([ok, { "role": "user", "content": [{ "type": "text" }] }]), "messages[1].content[0].text");
    refused(json!([ok, { "role": "user", "content": ["a"] }]), "messages[1].content[0].type");
    let call = json!([{ "role": "assistant", "content": null, "tool_calls": [{ "id": "1" }] }]);
    check("{{ messages[0].content is none }} {{ messages[0].tool_calls[0].id }}", &call, "True 1");
}

#[test]
fn templates_refuse_conversations_in_their_own_words() {
    let source = "{% if messages[0].role != 'user' %}{{ raise_exception('Conversation must start with user!') }}{% endif %}ok";
    check(source, &user("x"), "ok");
    let error = render(source, &json!([{ "role": "system", "content": "x" }])).unwrap_err().to_string();
    assert!(error.contains("Conversation must start with user!"), "{error}");
}

#[test]
fn errors_tell_what_and_where() {
    let check = |source: &str, expected: &str| {
        let error = render(source, &user("x")).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    };
    check("a\n{% for %}", "line 2");
    check("{{ messages[0].content.frobnicate() }}", "frobnicate");
    check("{{ nothing() }}", "nothing");
    check("{{ messages.append(1) }}", "append");
    check("{{ 1 | tojson(indent=99) }}", "indent");
}

#[test]
fn renderings_are_bounded() {
    let endless = "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}";
    assert!(matches!(render(endless, &user("x")), Err(TextError::Template { .. })));
    let deep = "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}";
    assert!(matches!(render(deep, &user("x")), Err(TextError::Template { .. })));
    let wide = "{% set ns = namespace(s='xxxxxxxx') %}{% for a in range(40) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}";
    assert!(matches!(render(wide, &user("x")), Err(TextError::Template { .. })));
    let nested = format!("{}x{}", "{% if true %}".repeat(3000), "{% endif %}".repeat(3000));
    let _ = render(&nested, &user("x"));
}

#[test]
fn strings_have_pythons_methods() {
    check_expression("[x.strip(), x.lstrip(), x.rstrip()] | join('|')", " a ", "a|a | a");
    check_expression("x.strip('xy')", "xyaxy", "a");
    check_expression("x.split('</think>')[-1].lstrip('\\n')", "thought</think>\n\nanswer", "answer");
    check_expression("x.split() | join('|')", "  a  b c ", "a|b|c");
    check_expression("x.split(',', 1) | join('|')", "a,b,c", "a|b,c");
    check_expression("x.rsplit(',', 1) | join('|')", "a,b,c", "a,b|c");
    check_expression("x.split(None, 1) | join('|')", " a  b c ", "a|b c");
    check_expression("x.rsplit(maxsplit=1) | join('|')", " a  b c ", "a  b|c");
    check_expression("x.split('a') | tojson", "aa", r#"["", "", ""]"#);
    check_expression("x.splitlines() | join('|')", "a\r\nb\n", "a|b");
    check_expression(
        "x.startswith('ab') and x.endswith(('x', 'c')) and not x.startswith('b')",
        "abc",
        "True",
    );
    check_expression("x.upper() ~ x.lower() ~ x.title() ~ x.capitalize()", "aB cD", "AB CDab cdAb CdAb cd");
    check_expression("x.replace('a', 'b') ~ x.replace('a', 'b', 1)", "aa", "bbba");
    check_expression("x.find('é') ~ x.find('z') ~ x.rfind('a') ~ x.count('a')", "aéa", "1-122");
    check_expression("'{} {{x}} {1} {k}'.format(x, 2, k=3)", "a", "a {x} 2 3");
    check_expression("'-'.join(['a', x])", "b", "a-b");
    check_expression("x.removeprefix('a').removesuffix('c')", "abc", "b");
    check_expression("x.partition('=') | join('|')", "k=v=w", "k|=|v=w");
    check_expression("x.isdigit() ~ x.isspace() ~ x.isalpha()", "12", "TrueFalseFalse");
}

#[test]
fn dictionaries_and_lists_have_pythons_methods() {
    check(
        "{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}",
        &user("x"),
        "role=user;content=x;",
    );
    check(
        "{{ messages[0].get('content') }}{{ messages[0].get('name') }}{{ messages[0].get('name', 'd') }}",
        &user("x"),
        "xNoned",
    );
    check(
        "{{ messages[0].keys() | join(',') }} {{ messages[0].values() | join(',') }}",
        &user("x"),
        "role,content user,x",
    );
    check("{{ ['a', 'b'].index('b') }}{{ ['a', 'b', 'a'].count('a') }}", &user("x"), "12");
}

#[test]
fn tojson_writes_as_python_does() {
    let value = json!([{ "role": "user", "content": "x", "b": [1, 2.5, true, null, "<é\"\n\u{1}"], "a": {}, "e": [] }]);
    check(
        "{{ messages[0] | tojson }}",
        &value,
        r#"{"role": "user", "content": "x", "b": [1, 2.5, true, null, "<é\"\n\u0001"], "a": {}, "e": []}"#,
    );
    check(
        "{{ messages[0].b | tojson(separators=(',', ':'), ensure_ascii=True) }}",
        &value,
        r#"[1,2.5,true,null,"<\u00e9\"\n\u0001"]"#,
    );
    check(
        "{{ {'b': [1], 'a': {}} | tojson(indent=2, sort_keys=true) }}",
        &value,
        "{\n  \"a\": {},\n  \"b\": [\n    1\n  ]\n}",
    );
}

#[test]
fn loops_can_be_left_and_messages_sliced() {
    let messages = json!([
        { "role": "system", "content": "s" }, { "role": "user", "content": "a" },
        { "role": "assistant", "content": "b" }, { "role": "user", "content": "c" },
    ]);
    let source = "{% for m in messages[1:] %}{% if m.role == 'assistant' %}{% continue %}{% endif %}{{ loop.index0 }}{{ m.content }}{% if loop.last %}.{% endif %}{% endfor %}{{ messages[::-1][0].content }}{{ messages[-2].content }}";
    check(source, &messages, "0a2c.cb");
    let first = "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% break %}{% endif %}{% endfor %}{{ ns.last }}";
    check(first, &messages, "1");
}

#[test]
fn given_variables_reach_the_template_and_do_not_replace_the_conversation() {
    let template = ChatTemplate::new(
        "{{ enable_thinking }} {{ messages[0].content }} {{ strftime_now('%d %b %Y') }} {{ tools is none }} {{ undefined_thing is defined }}",
        None,
        None,
    )
    .unwrap();
    let variables = json!({ "enable_thinking": false, "messages": "mine" });
    let options = ChatOptions {
        add_generation_prompt: true,
        now_unix_seconds: 1_722_000_000,
        variables: variables.as_object().unwrap().clone(),
    };
    let prompt = template.render(user("x").as_array().unwrap(), &options).unwrap();
    assert_eq!(prompt, "False x 26 Jul 2024 True False");
}

#[test]
fn marks_for_training_print_nothing() {
    check("a\n{%- generation -%}\n b {% endgeneration %}c", &user("x"), "ab c");
}

#[test]
fn the_demo_models_conversation_is_rendered_as_it_was_trained() {
    let Some(path) = asset("MICROSERVING_DEMO_MODEL") else { return };
    let model = TextBundle::from_gguf_file(&path, "demo").unwrap().build().unwrap();
    let options = ChatOptions { add_generation_prompt: true, ..ChatOptions::default() };
    let template = model.chat_template.unwrap();
    let prompt =
        template.render(user("What is the capital of France?").as_array().unwrap(), &options).unwrap();
    assert_eq!(
        prompt,
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    );
    let ids: Vec<u32> = model.tokenizer.encode_bare(&prompt).unwrap().iter().map(|token| token.0).collect();
    assert_eq!(
        ids,
        [
            1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407,
            19712, 8182, 2, 198, 1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531,
            198
        ]
    );
}

/// Compiles every template of a folder and compares what it renders with the file beside it, if there is one.
#[test]
#[ignore = "needs a folder of templates: set MICROSERVING_TEMPLATES"]
fn templates_of_many_models_render() {
    let folder = std::env::var("MICROSERVING_TEMPLATES").unwrap();
    let messages = json!([
        { "role": "user", "content": "Hello" }, { "role": "assistant", "content": "Hi <there>" },
        { "role": "user", "content": "How are \"you\"?" },
    ]);
    let mut failures = Vec::new();
    let mut rendered = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|extension| extension != "jinja") {
            continue;
        }
        let source = std::fs::read_to_string(&path).unwrap();
        let expected = std::fs::read_to_string(path.with_extension("expected")).ok();
        let options = ChatOptions { add_generation_prompt: true, ..ChatOptions::default() };
        let result = ChatTemplate::new(&source, Some("<s>"), Some("</s>"))
            .and_then(|template| template.render(messages.as_array().unwrap(), &options));
        rendered += 1;
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        match (result, expected) {
            (Ok(prompt), Some(expected)) if !expected.starts_with("ERROR") && prompt != expected => {
                failures.push(format!("{name}:\n  {prompt:?}\n  {expected:?}"));
            }
            (Err(error), Some(expected)) if !expected.starts_with("ERROR") => {
                failures.push(format!("{name}: {error}"));
            }
            (Err(error), None) => failures.push(format!("{name}: {error}")),
            _ => {}
        }
    }
    assert!(failures.is_empty(), "{} of {rendered}:\n{}", failures.len(), failures.join("\n"));
    assert!(rendered > 0);
}
