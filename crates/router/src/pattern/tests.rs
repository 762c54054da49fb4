use super::*;
use crate::{Balanced, Ctx, Error, ParameterKind, Request, TokenStream};

fn patterns() -> Patterns {
    Patterns::new(&Pattern::named("data_parallel"), vec![]).expect("exists")
}

fn check(text: &str) -> String {
    let patterns = patterns();
    let chosen = text.parse::<Pattern>().and_then(|pattern| {
        let chosen = patterns.choose(Some(&pattern))?;
        assert_eq!(chosen.program.name(), pattern.name);
        assert_eq!(patterns.set(&pattern)?.to_string(), "data_parallel");
        assert_eq!(chosen.text, patterns.current().to_string());
        // What is shown can be given back.
        let again: Pattern = chosen.text.parse()?;
        assert_eq!(patterns.check(&again)?, chosen.pattern);
        Ok(patterns.current())
    });
    chosen.map_or_else(|error| error.to_string(), |pattern| pattern.to_string())
}

#[test]
fn names_and_parameters() {
    for (text, expected) in [
        ("data_parallel", "data_parallel"),
        ("prefill_decode", "prefill_decode"),
        ("adaptive", "adaptive:fixed"),
        ("adaptive:roles=free", "adaptive:free"),
        ("adaptive:x", r#"pattern "adaptive" has the roles "x", must be one of fixed, free"#),
        ("balanced", "balanced:0.1"),
        ("balanced:0.25", "balanced:0.25"),
        ("balanced:ratio=0.25", "balanced:0.25"),
        ("balanced:1", "balanced:1"),
        ("balanced:x", r#"pattern "balanced" has the ratio "x", must be a number"#),
        ("balanced:", r#"pattern "balanced" has the ratio "", must be a number"#),
        ("balanced:-1", r#"pattern "balanced" has the ratio "-1", must be in [0, 1]"#),
        ("balanced:NaN", r#"pattern "balanced" has the ratio "NaN", must be in [0, 1]"#),
        ("balanced:0.1,ratio=0.2", r#"pattern "balanced" has ratio twice"#),
        ("balanced:ratio=1,ratio=1", r#"pattern "balanced" has ratio twice"#),
        ("balanced:speed=1", r#"pattern "balanced" has no speed, "1" was given"#),
        ("balanced:0.1,0.2", r#"pattern "balanced" has the parameter "0.2", must be written key=value"#),
        ("balanced:=1", r#"pattern "balanced" has the parameter "=1", must be written key=value"#),
        ("migrate", "migrate:16"),
        ("migrate:after_tokens=3", "migrate:3"),
        ("migrate:0", r#"pattern "migrate" has the after_tokens "0", must be in [1, 1000000]"#),
        ("data_parallel:0.5", r#"pattern "data_parallel" takes no parameter, "0.5" was given"#),
        (
            "",
            r#"pattern "" does not exist, must be one of adaptive, balanced, data_parallel, migrate, prefill_decode"#,
        ),
        (
            "x",
            r#"pattern "x" does not exist, must be one of adaptive, balanced, data_parallel, migrate, prefill_decode"#,
        ),
    ] {
        assert_eq!(check(text), expected);
    }
}

/// Takes one parameter of each kind.
#[derive(Debug)]
struct Everything(Vec<Parameter>);

impl Everything {
    fn new() -> Self {
        let choice = ParameterKind::Text { default: "a".into(), one_of: vec!["a".into(), "b".into()] };
        Self(vec![
            Parameter::integer("count", 3, 1, 9, "how many"),
            Parameter::switch("skip", false, "whether"),
            Parameter { name: "way".into(), kind: choice, doc: "which".into() },
        ])
    }
}

impl ProgramFactory for Everything {
    fn name(&self) -> &str {
        "everything"
    }

    fn parameters(&self) -> &[Parameter] {
        &self.0
    }

    fn build(&self, parameters: &Parameters) -> Result<Arc<dyn Program>, BadPattern> {
        let (count, skip) = (parameters.integer("count")?, parameters.switch("skip")?);
        if skip && count > 5 {
            return Err(BadPattern::parameter("everything", "skip", "skips at most 5"));
        }
        assert_eq!(
            parameters.number("nothing").map_err(|error| error.field().to_owned()),
            Err("name".into())
        );
        Ok(Arc::new(Named(format!("everything-{}", parameters.text("way")?))))
    }
}

#[derive(Debug)]
struct Named(String);

#[async_trait::async_trait]
impl Program for Named {
    fn name(&self) -> &str {
        &self.0
    }

    async fn serve(&self, _: &Ctx, _: &Request) -> Result<TokenStream, Error> {
        Err(Error::Deadline)
    }
}

#[test]
fn every_kind_of_parameter() {
    let patterns = patterns();
    patterns.register(Arc::new(Everything::new())).expect("a new name");
    let tried = |text: &str| {
        let checked = text.parse().and_then(|pattern: Pattern| patterns.check(&pattern));
        checked.map_or_else(|error| format!("{error} [{}]", error.field()), |pattern| pattern.to_string())
    };
    assert_eq!(tried("everything"), "everything:3,skip=false,way=a");
    assert_eq!(tried("everything:way=b,count=4"), "everything:4,skip=false,way=b");
    assert_eq!(tried("everything:4,skip=true"), "everything:4,skip=true,way=a");
    assert_eq!(
        tried("everything:1.5"),
        r#"pattern "everything" has the count "1.5", must be a whole number [count]"#
    );
    assert_eq!(
        tried("everything:skip=x"),
        r#"pattern "everything" has the skip "x", must be true or false [skip]"#
    );
    assert_eq!(
        tried("everything:way=c"),
        r#"pattern "everything" has the way "c", must be one of a, b [way]"#
    );
    assert_eq!(tried("everything:9,skip=true"), r#"pattern "everything" skips at most 5 [skip]"#);
    let json = patterns.check(&Pattern::named("everything").with("count", 2)).expect("fits").to_json();
    assert_eq!(json, serde_json::json!({"name": "everything", "count": 2, "skip": false, "way": "a"}));
}

#[test]
fn programs_come_and_go_while_requests_keep_theirs() {
    let patterns = patterns();
    let before = patterns.choose(Some(&"balanced:0.5".parse().expect("a pattern"))).expect("exists");
    patterns.set(&before.pattern).expect("exists");
    assert_eq!(
        patterns.unregister("balanced").expect_err("in use").to_string(),
        r#"pattern "balanced" is in use"#
    );
    assert!(patterns.factory("balanced").is_some(), "a refused change changes nothing");

    // One that cannot take over what is in use is refused.
    let fixed: Arc<dyn Program> = Arc::new(Named("balanced".into()));
    let error = patterns.register(Arc::new(Fixed(fixed.clone()))).expect_err("has no ratio");
    assert_eq!(error.field(), "ratio");
    assert_eq!(patterns.current().to_string(), "balanced:0.5");

    patterns.set(&Pattern::named("data_parallel")).expect("exists");
    assert!(patterns.register(Arc::new(Fixed(fixed))).expect("fits now").is_some());
    assert_eq!(format!("{:?}", before.program), format!("{:?}", Balanced::new(0.5).expect("in range")));
    patterns.unregister("balanced").expect("not in use");
    assert_eq!(patterns.unregister("balanced").expect_err("gone").field(), "name");
    assert_eq!(patterns.names(), ["adaptive", "data_parallel", "migrate", "prefill_decode"]);
}

#[test]
fn names_that_nobody_could_write_are_refused() {
    let patterns = patterns();
    for name in ["", "a b", "a:b", "a,b", "é", &"x".repeat(65)] {
        let factory = Fixed(Arc::new(Named(name.to_owned())));
        assert!(patterns.register(Arc::new(factory)).is_err(), "{name}");
    }
}
