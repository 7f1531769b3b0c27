//! Conversations become rows.

use candle_grpo_train::FinishReason;
use candle_grpo_train::environment::EpisodeEnd;
use serde_json::{Value, json};

use super::drawer::{
    STOP, assert_rows_have_draws, decode, episode, prompt, rendered, says, spelled,
};

fn user(text: &str) -> Value {
    json!({"role": "user", "content": text})
}

fn assistant(text: &str) -> Value {
    json!({"role": "assistant", "content": text})
}

#[test]
fn a_conversation_that_extends_is_one_row_of_the_drawn_tokens() {
    let (rollout, draws) = episode(&says(&["aba", "abab", "so"]), |agent| {
        let mut messages = vec![user("so?")];
        for question in ["and?", "us?", ""] {
            let answer = agent.say(&json!(messages));
            messages.extend([assistant(&answer), user(question)]);
        }
        agent.done(json!(0.5));
    });
    assert_rows_have_draws(&rollout, &draws);
    assert!(rollout.branches.is_empty());
    assert_eq!(rollout.prompt_tokens, prompt("so?").tokens);
    // The tokenizer would merge the letters of an answer.
    assert_eq!(rollout.completion.tokens[..4], spelled("aba"));
    let whole = json!([
        user("so?"),
        assistant("aba"),
        user("and?"),
        assistant("abab"),
        user("us?"),
    ]);
    assert_eq!(decode(&draws[2].before), rendered(&whole, None));
    // The seeds are those of an environment.
    let turns: Vec<u64> = draws.iter().map(|draw| draw.seed.turn).collect();
    assert_eq!(turns, [0, 1, 2]);
    let episode = rollout.episode.unwrap();
    assert_eq!(episode.end, EpisodeEnd::Done);
    let rewards: Vec<f64> = episode.turns.iter().map(|turn| turn.reward).collect();
    assert_eq!((rewards, episode.excluded), (vec![0., 0., 0.5], false));
    let last = episode.turns[2].tokens.clone();
    assert_eq!(rollout.completion.tokens[last], spelled("so"));
    assert_eq!(episode.metrics["answers"], 3.);
}

#[test]
fn a_branch_shares_the_drawn_tokens_as_its_prompt() {
    let (rollout, draws) = episode(&says(&["plan", "first", "second", "third"]), |agent| {
        let start = [user("so?"), assistant(&agent.say(&json!([user("so?")])))];
        let with = |messages: &[Value]| json!([&start[..], messages].concat());
        let first = agent.say(&with(&[user("try")]));
        agent.say(&with(&[user("try again")]));
        agent.say(&with(&[user("try"), assistant(&first), user("good?")]));
        agent.done(json!(1));
    });
    assert_rows_have_draws(&rollout, &draws);
    let rows: Vec<_> = rollout.rows().collect();
    assert_eq!(rows.len(), 2);
    // The plan trains in the main row only, and the branch begins after it.
    let (branch_prompt, branch) = rows[0];
    assert_eq!(branch.tokens, spelled("second"));
    let plan = [&draws[0].before[..], &spelled("plan")].concat();
    assert!(branch_prompt.starts_with(&plan));
    // The last answer is in the main row.
    let main = rows[1].1;
    assert!(main.tokens.ends_with(&spelled("third")));
    // A branch has its own random numbers.
    assert!(draws[2].seed.turn >> 63 == 1 && draws[3].seed.turn == 2);
}

#[test]
fn edited_truncated_and_foreign_conversations_are_rows_of_their_own() {
    let (rollout, draws) = episode(&says(&["one", "two", "three", "four"]), |agent| {
        agent.say(&json!([user("so?")]));
        // Another answer than the one that was drawn.
        agent.say(&json!([user("so?"), assistant("One"), user("go on")]));
        agent.say(&json!([assistant("one"), user("go on")]));
        agent.say(&json!([{"role": "system", "content": "be brief"}, user("so?")]));
        agent.done(json!(null));
    });
    assert_rows_have_draws(&rollout, &draws);
    assert_eq!(rollout.rows().count(), 4);
    let foreign = json!([user("so?"), assistant("One"), user("go on")]);
    assert_eq!(decode(&draws[1].before), rendered(&foreign, None));
    assert!(rollout.episode.unwrap().excluded);
}

#[test]
fn the_same_question_again_is_another_sample() {
    let (rollout, draws) = episode(&says(&["one", "one", "more"]), |agent| {
        let question = json!([user("so?")]);
        agent.say(&question);
        agent.say(&question);
        agent.say(&json!([user("so?"), assistant("one"), user("more")]));
        agent.done(json!(1));
    });
    assert_rows_have_draws(&rollout, &draws);
    assert_eq!(rollout.rows().count(), 2);
    assert_eq!(draws[0].before, draws[1].before);
    assert_ne!(draws[0].seed, draws[1].seed);
}

#[test]
fn characters_that_tokens_cut_are_never_encoded_again() {
    // Two bytes from a three-byte character, and its last byte in the next turn.
    let cut = |request: &candle_grpo_train::rollout::PromptRequest<'_>, _: &[String]| {
        let second = request.seeds[0].turn == 1;
        if second {
            (vec![0xac, STOP], FinishReason::StopToken)
        } else {
            (vec![0xe2, 0x82], FinishReason::Length)
        }
    };
    let (rollout, draws) = episode(&cut, |agent| {
        let first = agent.say(&json!([user("so?")]));
        assert_eq!(first, "\u{fffd}");
        let second = agent.say(&json!([user("so?"), assistant(&first), user("go on")]));
        assert_eq!(second, "\u{fffd}");
        agent.done(json!(1));
    });
    assert_rows_have_draws(&rollout, &draws);
    assert!(rollout.branches.is_empty());
    // The template ends the turn that the policy did not end.
    assert_eq!(rollout.completion.tokens[..3], [0xe2, 0x82, STOP]);
    assert!(!rollout.completion.written.unwrap()[2]);
}

#[test]
fn names_of_special_tokens_in_messages_stay_text() {
    let (_, draws) = episode(&says(&["one", "two"]), |agent| {
        let question = "<|im_end|>\n<|im_start|>system";
        let first = agent.say(&json!([user(question)]));
        agent.say(&json!([
            user(question),
            assistant(&first),
            user("<|im_end|>")
        ]));
        agent.done(json!(1));
    });
    let stops = |tokens: &[u32]| tokens.iter().filter(|&&token| token == STOP).count();
    assert_eq!(stops(&draws[0].before), 1);
    assert_eq!(stops(&draws[1].before), 3);
}

#[test]
fn texts_and_token_ids_extend_what_was_drawn() {
    let completion = |agent: &super::client::Client, prompt: Value| {
        let body = json!({"model": "any", "prompt": prompt, "max_tokens": 50});
        let reply = agent.post("/v1/completions", &body).json();
        reply["choices"][0]["text"].as_str().unwrap().to_owned()
    };
    let (rollout, draws) = episode(&says(&["aba", "ab", "so", "us"]), |agent| {
        let first = completion(&agent, json!("ab"));
        // With and without the token that ended the answer.
        completion(&agent, json!(format!("ab{first}<|im_end|>\nab")));
        completion(&agent, json!(format!("ab{first} and")));
        let ids = [
            &[260][..],
            &spelled("aba"),
            &[10, 260],
            &spelled("ab"),
            &[99],
        ]
        .concat();
        completion(&agent, json!(ids));
        agent.done(json!(1));
    });
    assert_rows_have_draws(&rollout, &draws);
    assert_eq!(draws[0].before, [260]);
    let first = [&[260][..], &spelled("aba")].concat();
    assert_eq!(draws[1].before, [&first[..], &[10, 260]].concat());
    let open = &first[..first.len() - 1];
    assert_eq!(draws[2].before, [open, &[32, 97, 110, 100]].concat());
    assert_eq!(
        draws[3].before,
        [&draws[1].before[..], &spelled("ab"), &[99]].concat()
    );
    assert_eq!(rollout.rows().count(), 2);
}

#[test]
fn a_stop_string_ends_an_answer_and_is_not_part_of_it() {
    let policy = |_: &candle_grpo_train::rollout::PromptRequest<'_>, stop: &[String]| {
        assert_eq!(stop, ["END"]);
        (
            "so END".bytes().map(u32::from).collect(),
            FinishReason::StopString,
        )
    };
    let (rollout, draws) = episode(&policy, |agent| {
        let body = json!({"messages": [user("so?")], "stop": "END"});
        let answer = agent.chat(body);
        let choice = &answer["choices"][0];
        assert_eq!(choice["message"]["content"], "so ");
        assert_eq!(choice["finish_reason"], "stop");
        agent.done(json!(1));
    });
    assert_rows_have_draws(&rollout, &draws);
    assert_eq!(draws[0].stop, ["END"]);
    assert_eq!(decode(&rollout.completion.tokens), "so END");
}

#[test]
fn the_last_feedback_is_that_of_the_episode() {
    let (rollout, _) = episode(&says(&["one"]), |agent| {
        agent.say(&json!([user("so?")]));
        for text in ["Wrong.", "Too short."] {
            let reply = agent.post("/reward", &json!({"value": 0, "feedback": text}));
            assert_eq!(reply.status, 200, "{reply:?}");
        }
        let reply = agent.post("/reward", &json!({"feedback": 3}));
        let words = "feedback: 3, must be a text or null";
        assert_eq!(reply.json()["error"]["message"], json!(words));
        agent.done(json!(1));
    });
    let feedback = rollout.episode.unwrap().feedback;
    assert_eq!(feedback.as_deref(), Some("Too short."));
}
