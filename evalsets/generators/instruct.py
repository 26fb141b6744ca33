"""Chat instructions with checkable answers -> evalsets/tasks/instruct.jsonl.

Every word, text and answer was written by hand; items of one wording share a
cluster, single items have their own. The reference model is small and replies in
whole sentences even when told to use one word, so the task's filter reads the
answer out of the first clause of the reply (up to . , ! ? ; or the line's end):
what follows its last "is", "are", "was", "has", "called", "=" or ":", without
quotes and without a leading article or "in", "located in", "indeed", "approximately";
or the clause itself if it has none of those.
"answers" holds every spelling that then counts (for most slices also the
lower-case, capitalised and upper-case spelling; for EXACT slices none is added).

Run from the parent of evalsets: python evalsets/generators/instruct.py
"""

import json
import re
from pathlib import Path

OUT = Path(__file__).resolve().parent.parent / "tasks" / "instruct.jsonl"

# Slices where the case of the answer is part of the instruction.
EXACT = {"upper"}
LEAD = re.compile(r"^(?:(?:in|a|an|the)\s+)+", re.IGNORECASE)

# (slice, wording with {x}, [(x, answer or list of answers), ...]): one cluster each.
GROUPS = [
    ("place", "What is the capital of {x}? Answer with one word.", [
        ("France", "Paris"), ("Italy", "Rome"), ("Japan", "Tokyo"), ("Spain", "Madrid"),
        ("Germany", "Berlin"), ("Russia", "Moscow"), ("Egypt", "Cairo"), ("Greece", "Athens"),
    ]),
    ("place", "In which country is the city of {x}? Answer with the name of the country.", [
        ("Berlin", "Germany"), ("Milan", "Italy"), ("Mumbai", "India"), ("Toronto", "Canada"),
        ("Barcelona", "Spain"), ("Sydney", "Australia"),
    ]),
    ("opposite", "What is the opposite of {x}? Answer with one word.", [
        ("hot", "cold"), ("up", "down"), ("big", ["small", "little"]),
        ("happy", ["sad", "unhappy", "sadness"]), ("open", ["closed", "close", "shut"]),
        ("fast", "slow"),
    ]),
    ("opposite", "Name the opposite of the word \"{x}\".", [
        ("young", "old"), ("hard", ["soft", "easy"]), ("early", "late"),
        ("strong", "weak"), ("long", "short"),
        ("arrive", ["leave", "depart"]), ("generous", ["selfish", "stingy", "mean", "greedy"]), ("borrow", "lend"),
        ("ancient", ["modern", "new"]), ("noisy", ["quiet", "silent"]), ("export", "import"),
    ]),
    ("form", "What is the plural of \"{x}\"? Answer with one word.", [
        ("cat", "cats"), ("book", "books"), ("house", "houses"), ("tree", "trees"),
        ("child", "children"), ("box", "boxes"), ("mouse", "mice"),
    ]),
    ("form", "What is the past tense of \"{x}\"? Answer with one word.", [
        ("walk", "walked"), ("jump", "jumped"), ("look", "looked"), ("run", "ran"), ("see", "saw"), ("open", "opened"),
    ]),
    ("letter", "What is the first letter of the word \"{x}\"?", [
        ("house", "h"), ("apple", "a"), ("table", "t"), ("green", "g"), ("money", "m"), ("river", "r"),
    ]),
    ("letter", "What is the last letter of the word \"{x}\"?", [
        ("cat", "t"), ("dog", "g"), ("sun", "n"), ("bread", "d"),
    ]),
    ("upper", "Rewrite this word in capital letters: {x}", [
        ("hello", "HELLO"), ("music", "MUSIC"), ("river", "RIVER"), ("street", "STREET"), ("water", "WATER"),
    ]),
    ("upper", "Write this word in capital letters: {x}", [
        ("green", "GREEN"), ("house", "HOUSE"), ("winter", "WINTER"), ("lemon", "LEMON"), ("school", "SCHOOL"),
    ]),
    ("translate", "What is the Spanish word for \"{x}\"? Answer with one word.", [
        ("hello", "hola"), ("house", "casa"), ("friend", ["amigo", "amiga"]), ("good", ["bueno", "buena", "bien"]),
    ]),
    ("translate", "What is the English translation of \"{x}\"? Answer with one word.", [
        ("libro", "book"), ("hola", ["hello", "hi"]), ("gracias", ["thank you", "thanks"]), ("bonjour", ["hello", "good morning", "good day"]),
    ]),
    ("list", "What is the first number in this list: {x}?", [
        ("8, 3, 5", "8"), ("4, 9, 2", "4"), ("7, 1, 6", "7"), ("12, 40, 31", "12"), ("25, 60, 18", "25"),
    ]),
    ("list", "What is the last word in this list: {x}?", [
        ("lamp, door, shoe", "shoe"), ("red, green, blue", "blue"), ("cat, horse, bird", "bird"),
        ("milk, bread, salt", "salt"), ("rain, snow, wind", "wind"),
    ]),
    ("list", "What is the second number in this list: {x}?", [
        ("8, 3, 5", "3"), ("4, 9, 2", "9"), ("7, 1, 6", "1"), ("12, 40, 31", "40"),
    ]),
    ("either", "Answer with one word. Is {x}?", [
        ("a rose a flower or an animal", "flower"), ("a banana a fruit or a tool", "fruit"),
        ("a hammer a tool or a drink", "tool"), ("a dog an animal or a plant", "animal"),
        ("milk a drink or a metal", "drink"), ("Paris a city or a river", "city"),
        ("a piano an instrument or a vegetable", ["instrument", "musical instrument"]),
    ]),
    ("either", "What is the {x}? Answer with one word.", [
        ("color in this list: river, blue, pencil", "blue"), ("fruit in this list: hammer, apple, window", "apple"),
        ("animal in this list: table, spoon, horse", "horse"), ("country in this list: cheese, Spain, winter", "Spain"),
        ("drink in this list: carpet, milk, brick", "milk"), ("number in this list: seven, garden, bottle", "seven"),
    ]),
    ("sentiment", "Is the following sentence positive or negative? \"{x}\" Answer with one word.", [
        ("I love this song.", "positive"), ("I hate this song.", "negative"),
        ("The food was awful and cold.", "negative"), ("The hotel was clean and the staff was friendly.", "positive"),
        ("My new phone broke after one day.", "negative"), ("This is the best coffee in town.", "positive"),
        ("The book was boring and far too long.", "negative"), ("We had a wonderful holiday.", "positive"),
        ("The waiter was rude to us.", "negative"), ("Thank you for the beautiful flowers!", "positive"),
        ("It was the worst day of my life.", "negative"), ("The children enjoyed the party very much.", "positive"),
    ]),
    ("yesno", "{x} Answer yes or no.", [
        ("Is the sun hot?", "yes"), ("Can a stone talk?", "no"), ("Can a fish swim?", "yes"), ("Do cats have wings?", "no"),
        ("Is sugar sweet?", "yes"), ("Is a mouse bigger than an elephant?", "no"), ("Is Paris in France?", "yes"), ("Is ice warm?", "no"),
    ]),
    ("number", "What is {x}? Answer with a number.", [
        ("2 + 3", "5"), ("3 + 4", "7"), ("5 + 5", "10"), ("10 - 4", "6"), ("3 x 3", "9"), ("half of 10", "5"),
    ]),
    ("json", "{x}\nWhat is the value of \"name\"?", [
        ("{\"name\": \"Lea\", \"age\": 9}", "Lea"), ("{\"id\": 14, \"name\": \"Victor\"}", "Victor"),
        ("{\"name\": \"Sophie\", \"city\": \"Oslo\"}", "Sophie"), ("{\"age\": 52, \"name\": \"Martin\"}", "Martin"),
    ]),
    ("json", "{x}\nWhat is the value of \"age\"?", [
        ("{\"name\": \"Lea\", \"age\": 9}", "9"), ("{\"age\": 31, \"city\": \"Rome\"}", "31"),
        ("{\"age\": 47, \"job\": \"baker\"}", "47"), ("{\"team\": \"red\", \"age\": 12}", "12"),
    ]),
]

# Single items: (slice, instruction, answer or list of answers).
SINGLE = [
    ("count", "How many legs does a dog have? Answer with a number.", ["4", "four", "4 legs", "four legs", "A dog has 4 legs"]),
    ("count", "How many days are in a week? Answer with a number.", ["7", "seven", "7 days", "seven days", "7 days in a week"]),
    ("count", "How many wheels does a bicycle have? Answer with a number.", ["2", "two", "2 wheels", "two wheels"]),
    ("count", "How many months are in a year? Answer with a number.", ["12", "twelve", "12 months", "twelve months", "12 months in a year"]),
    ("count", "How many eyes does a person have? Answer with a number.", ["2", "two", "2 eyes", "two eyes"]),
    ("count", "How many minutes are in an hour? Answer with a number.", ["60", "sixty", "60 minutes", "sixty minutes", "60 minutes in an hour"]),
    ("extract", "Anna has 12 sheep on her farm. How many sheep does Anna have?", ["12", "12 sheep", "12 sheep on her farm"]),
    ("extract", "The name of our boat is Victoria. What is the name of our boat?", "Victoria"),
    ("extract", "There are 48 rooms in the hotel. What is the number of rooms in the hotel?", ["48", "48 rooms", "48 rooms in the hotel"]),
    ("extract", "The train leaves from platform 6. From which platform does the train leave?", ["6", "platform 6", "The train leaves from platform 6"]),
    ("extract", "Peter was born in 1987 in Norway. What is the year of Peter's birth?", "1987"),
    ("extract", "Peter was born in 1987 in Norway. In which country was Peter born?", ["Norway", "born in Norway", "born in 1987 in Norway"]),
    ("extract", "Sarah put the red ball in the box. What is the color of the ball?", ["red", "red ball"]),
    ("extract", "The meeting is on Thursday. What is the day of the meeting?", ["Thursday", "on Thursday", "scheduled for Thursday"]),
    ("extract", "Maria is 30 years old. How old is Maria?", ["30", "30 years old", "30 years"]),
    ("extract", "Our teacher is Mrs Lopez. Who is our teacher?", ["Mrs Lopez", "Lopez", "Mrs. Lopez"]),
    ("extract", "Lina bought a bicycle last week. What did Lina buy?", ["bicycle", "a bicycle", "Lina bought a bicycle", "Lina bought a bicycle last week", "She bought a bicycle"]),
    ("extract", "The ticket costs 35 dollars. What is the cost of the ticket?", ["35", "35 dollars", "$35", "The ticket costs 35 dollars"]),
    ("extract", "My uncle works as a baker in Madrid. What is the job of my uncle?", "baker"),
    ("extract", "The capital of the island is Port Olm. What is the capital of the island?", "Port Olm"),
    ("extract", "The dog of the Klein family is called Bruno. What is the dog called?", "Bruno"),
    ("extract", "Emma lives in Vienna and Paul lives in Rome. In which city does Emma live?", ["Vienna", "Emma lives in Vienna"]),
    ("extract", "Emma lives in Vienna and Paul lives in Rome. In which city does Paul live?", ["Rome", "Paul lives in Rome"]),
    ("extract", "The blue box is full and the green box is empty. Which box is empty?", ["green", "green box", "The green box"]),
    ("extract", "Tom ate the soup and Kate ate the salad. Who ate the salad?", ["Kate", "Kate ate the salad", "Kate's"]),
    ("extract", "The code of the door is 5512. What is the code of the door?", "5512"),
    ("extract", "The concert begins at 8. At what time does the concert begin?", ["8", "at 8", "The concert begins at 8"]),
    ("extract", "What is the number in this sentence? \"We saw 15 ships.\"", "15"),
    ("extract", "What is the animal in this sentence? \"A horse stood by the gate.\"", "horse"),
    ("extract", "What is the color in this sentence? \"She wore a yellow dress.\"", "yellow"),
]


def spellings(label, answers):
    answers = [answers] if isinstance(answers, str) else list(answers)
    if label in EXACT:
        return answers
    # the filter drops a leading article or "in", so the same is done here
    answers += [LEAD.sub("", a) for a in answers]
    out = []
    for a in answers:
        for form in (a, a.lower(), a[:1].upper() + a[1:].lower(), a.upper()):
            if form not in out:
                out.append(form)
    return out


def build():
    rows = []

    def add(label, cluster, context, answers):
        rows.append(
            {
                "id": f"instruct-{len(rows) + 1:03d}",
                "slice": label,
                "cluster": cluster,
                "context": context,
                "answers": spellings(label, answers),
            }
        )

    seen = {}
    for label, wording, items in GROUPS:
        seen[label] = seen.get(label, 0) + 1
        for x, answers in items:
            add(label, f"instruct-{label}-{seen[label]}", wording.replace("{x}", x), answers)
    for label, context, answers in SINGLE:
        add(label, f"instruct-{len(rows) + 1:03d}", context, answers)
    return rows


def main():
    rows = build()
    assert len({r["context"] for r in rows}) == len(rows)
    with OUT.open("w", encoding="utf-8", newline="\n") as f:
        for row in rows:
            f.write(json.dumps(row, ensure_ascii=False) + "\n")
    print(f"{OUT.name}: {len(rows)} rows")


if __name__ == "__main__":
    main()
