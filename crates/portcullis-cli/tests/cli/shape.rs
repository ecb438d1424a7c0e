//! The shape of a result for machines, as a document has it: the names of fields, in braces, one in another.
//!
//! Behind a name may stand what is in it: an object, a list of objects, `[..]` for a list of anything, or `the same` as the field
//! before; a field without is no object. One with `?` is in some results only.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::Value;

#[derive(Debug, Clone, PartialEq)]
pub enum Shape {
    Anything,
    Plain,
    Object(BTreeMap<String, Field>),
    Objects(BTreeMap<String, Field>),
}

#[derive(Debug, Clone, PartialEq)]
pub struct Field {
    shape: Shape,
    always: bool,
}

/// The shape that a file of `docs` has: of its first block that begins with `schema`.
pub fn documented(document: &str) -> Shape {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs").join(document);
    let text = std::fs::read_to_string(path).unwrap();
    let (_, block) =
        text.split_once("```text\n{\"schema\"").unwrap_or_else(|| panic!("{document}: no shape"));
    let block = format!("{{\"schema\"{}", block.split("```").next().unwrap());
    let (shape, rest) = read(&block, None);
    assert_eq!((document, rest.trim()), (document, ""), "the block ends with its object");
    shape
}

/// Reads the shape of a field. "the same" stands for `before`, the shape of the field before it.
fn read<'a>(text: &'a str, before: Option<&Shape>) -> (Shape, &'a str) {
    let text = text.trim_start();
    if let Some(rest) = text.strip_prefix('{') {
        let (fields, rest) = fields(rest);
        return (Shape::Object(fields), rest);
    }
    if let Some(rest) = text.strip_prefix('[') {
        let Some(rest) = rest.strip_prefix('{') else {
            let mut open = 1;
            let end = rest.find(|letter| {
                open += i32::from(letter == '[') - i32::from(letter == ']');
                open == 0
            });
            return (Shape::Anything, &rest[end.unwrap() + 1..]);
        };
        let (fields, rest) = fields(rest);
        return (Shape::Objects(fields), rest.strip_prefix(']').unwrap());
    }
    let (what, rest) = text.split_at(text.find([',', '}']).unwrap());
    let shape = if what.starts_with("the same") { before.unwrap().clone() } else { Shape::Plain };
    (shape, rest)
}

/// Reads fields and the brace behind them.
fn fields(mut text: &str) -> (BTreeMap<String, Field>, &str) {
    let (mut fields, mut before) = (BTreeMap::new(), None);
    loop {
        let (_, rest) = text.split_once('"').unwrap();
        let (name, mut rest) = rest.split_once('"').unwrap();
        let always = !rest.starts_with('?');
        rest = rest.strip_prefix('?').unwrap_or(rest);
        let mut shape = Shape::Plain;
        if let Some(value) = rest.strip_prefix(':') {
            (shape, rest) = read(value, before.as_ref());
        }
        before = Some(shape.clone());
        assert_eq!(fields.insert(name.to_owned(), Field { shape, always }), None, "{name} is there twice");
        if let Some(rest) = rest.strip_prefix('}') {
            return (fields, rest);
        }
        text = rest.strip_prefix(',').unwrap_or_else(|| panic!("behind {name}: {rest}"));
    }
}

impl Shape {
    /// The shape of a field of an object.
    fn of(&self, name: &str) -> &Self {
        match self {
            Self::Object(fields) => &fields[name].shape,
            _ => panic!("{self:?} has no fields"),
        }
    }

    /// What of `value` is not as it should be.
    pub fn wrong_with(&self, value: &Value) -> Vec<String> {
        let mut wrong = Vec::new();
        self.compare(value, "", &mut wrong);
        wrong
    }

    fn compare(&self, value: &Value, at: &str, wrong: &mut Vec<String>) {
        let has_objects =
            value.is_object() || value.as_array().is_some_and(|all| all.iter().any(Value::is_object));
        match self {
            Self::Anything => {}
            _ if value.is_null() => {}
            Self::Plain if has_objects => wrong.push(format!("{at}: an object")),
            Self::Plain => {}
            Self::Object(fields) => compare(fields, value, at, wrong),
            Self::Objects(fields) => match value.as_array() {
                Some(all) => all.iter().for_each(|value| compare(fields, value, at, wrong)),
                None => wrong.push(format!("{at}: no list")),
            },
        }
    }
}

fn compare(fields: &BTreeMap<String, Field>, value: &Value, at: &str, wrong: &mut Vec<String>) {
    let Some(object) = value.as_object() else { return wrong.push(format!("{at}: no object")) };
    let unknown = object.keys().filter(|name| !fields.contains_key(*name));
    wrong.extend(unknown.map(|name| format!("{at}.{name}: not documented")));
    for (name, Field { shape, always }) in fields {
        let at = format!("{at}.{name}");
        match object.get(name) {
            Some(value) => shape.compare(value, &at, wrong),
            None if *always => wrong.push(format!("{at}: not there")),
            None => {}
        }
    }
}

#[test]
fn what_differs_from_a_shape_is_found() {
    let (shape, _) = read(
        r#"{"a": 1, "b": {"c", "d"?}, "e": the same or null, "f": [[ns, calls], ..], "g": [{"h": [x, y]}], "i": [..]}"#,
        None,
    );
    let good = serde_json::json!({
        "a": "x", "b": {"c": 1}, "e": {"c": [1], "d": 2}, "f": [[1, 2]], "g": [{"h": 1}, {"h": 2}], "i": [{"any": 1}]
    });
    assert_eq!(shape.wrong_with(&good), [""; 0]);
    let null = serde_json::json!({"a": 1, "b": {"c": 1}, "e": null, "f": [], "g": [], "i": []});
    assert_eq!(shape.wrong_with(&null), [""; 0]);
    for (at, bad, expected) in [
        ("/a", serde_json::json!({}), ".a: an object"),
        ("/b", serde_json::json!({"c": 1, "z": 1}), ".b.z: not documented"),
        ("/e", serde_json::json!({"d": 1}), ".e.c: not there"),
        ("/g", serde_json::json!([{"h": 1}, {}]), ".g.h: not there"),
        ("/g", serde_json::json!({"h": 1}), ".g: no list"),
    ] {
        let mut value = good.clone();
        *value.pointer_mut(at).unwrap() = bad;
        assert_eq!(shape.wrong_with(&value), [expected]);
    }
}

#[test]
fn all_results_begin_with_the_same_head() {
    let heads = ["replay.md", "bench.md", "scaling.md", "linux.md"].map(|document| {
        let shape = documented(document);
        ["schema", "tool", "command", "machine"].map(|name| shape.of(name).clone())
    });
    assert!(heads.iter().all(|head| *head == heads[0]), "{heads:?}");
}
