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
EXACT = {"upper", "lower"}
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

# Written later, and put after the rows above so that their ids stay: more wordings, fewer items each.
MORE_GROUPS = [
    ("place", "Finish the sentence with one word. The capital city of {x} is", [
        ("Portugal", "Lisbon"), ("Austria", "Vienna"), ("Poland", "Warsaw"), ("Ireland", "Dublin"),
    ]),
    ("place", "What is the name of the capital of {x}?", [
        ("Norway", "Oslo"), ("Cuba", "Havana"), ("Hungary", "Budapest"), ("China", ["Beijing", "Peking"]),
    ]),
    ("place", "What is the main language of {x}? Answer with one word.", [
        ("Brazil", ["Portuguese", "Brazilian Portuguese"]), ("Mexico", ["Spanish", "Mexican Spanish"]),
        ("Austria", ["German", "Austrian German"]), ("Japan", "Japanese"),
    ]),
    ("place", "What is the continent of {x}? Give only the name of the continent.", [
        ("France", ["Europe", "European continent", "continent of Europe"]), ("India", ["Asia", "Asian continent", "continent of Asia"]),
        ("Nigeria", ["Africa", "African continent", "continent of Africa"]),
        ("Argentina", ["South America", "South American continent", "continent of South America"]),
    ]),
    ("place", "What is the currency of {x}? Answer with one word.", [
        ("Japan", ["yen", "Japanese yen", "yen (JPY)", "Japanese yen (JPY)", "yen (¥)", "Japanese yen (¥)", "JPY"]),
        ("India", ["rupee", "Indian rupee", "rupees", "rupee (INR)", "Indian rupee (INR)", "rupee (₹)", "Indian rupee (₹)", "INR"]),
        ("Mexico", ["peso", "Mexican peso", "pesos", "peso (MXN)", "Mexican peso (MXN)", "MXN"]),
    ]),
    ("opposite", "Give the opposite of \"{x}\" in one word.", [
        ("wet", "dry"), ("full", "empty"), ("rich", "poor"), ("tall", ["short", "small"]),
    ]),
    ("opposite", "What is the antonym of \"{x}\"? One word only.", [
        ("begin", ["end", "finish", "stop", "conclude", "cease"]), ("accept", ["reject", "refuse", "decline", "deny"]),
        ("remember", "forget"), ("love", ["hate", "hatred"]),
    ]),
    ("opposite", "What word means the opposite of \"{x}\"?", [
        ("dirty", "clean"), ("cheap", ["expensive", "costly", "dear", "pricey"]), ("heavy", ["light", "lightweight"]),
    ]),
    ("opposite", "Complete the sentence: The opposite of {x} is", [
        ("north", "south"), ("winter", "summer"), ("first", "last"), ("inside", "outside"),
    ]),
    ("opposite", "Tell me the opposite of the adjective \"{x}\".", [
        ("deep", "shallow"), ("polite", ["rude", "impolite", "discourteous"]), ("thick", "thin"), ("smooth", ["rough", "bumpy", "coarse"]),
    ]),
    ("opposite", "What is the opposite of \"to {x}\"? Answer with one verb.", [
        ("push", ["pull", "to pull"]), ("win", ["lose", "to lose"]), ("laugh", ["cry", "to cry", "weep", "to weep"]),
        ("sell", ["buy", "to buy", "purchase", "to purchase"]),
    ]),
    ("form", "Write the plural of the word \"{x}\".", [
        ("woman", "women"), ("city", "cities"), ("foot", "feet"), ("knife", "knives"),
    ]),
    ("form", "What is the plural form of the noun \"{x}\"?", [
        ("tooth", "teeth"), ("baby", "babies"), ("bus", ["buses", "busses"]),
    ]),
    ("form", "What is the singular of \"{x}\"? Answer with one word.", [
        ("apples", "apple"), ("men", "man"), ("wolves", "wolf"),
    ]),
    ("form", "What is the past tense of the verb \"to {x}\"?", [
        ("go", "went"), ("eat", "ate"), ("play", "played"), ("write", "wrote"),
    ]),
    ("form", "What is the comparative form of \"{x}\"? One word only.", [
        ("small", "smaller"), ("good", "better"), ("cold", "colder"),
    ]),
    ("form", "What is the superlative of the word \"{x}\"?", [
        ("tall", "tallest"), ("bad", "worst"), ("fast", "fastest"),
    ]),
    ("letter", "What is the first letter of \"{x}\"? Answer with one letter.", [
        ("window", "w"), ("dinner", "d"), ("candle", "c"), ("people", "p"),
    ]),
    ("letter", "What is the first letter of the name {x}?", [
        ("Thomas", "T"), ("Laura", "L"), ("Edward", "E"),
    ]),
    ("letter", "What is the final letter in the word \"{x}\"?", [
        ("moon", "n"), ("hat", "t"),
    ]),
    ("letter", "What is the letter after {x} in the alphabet?", [
        ("B", "C"), ("F", "G"), ("M", "N"), ("S", "T"),
    ]),
    ("upper", "What is the uppercase form of the word \"{x}\"?", [
        ("garden", "GARDEN"), ("bridge", "BRIDGE"), ("orange", "ORANGE"), ("paper", "PAPER"),
    ]),
    ("upper", "Write \"{x}\" in all caps.", [
        ("stop", "STOP"), ("danger", "DANGER"), ("welcome", "WELCOME"),
    ]),
    ("upper", "Change this word to uppercase: {x}", [
        ("north", "NORTH"), ("dance", "DANCE"), ("cloud", "CLOUD"),
    ]),
    ("lower", "What is the lowercase form of the word \"{x}\"?", [
        ("APPLE", "apple"), ("FOREST", "forest"), ("KITCHEN", "kitchen"),
    ]),
    ("lower", "Rewrite this word in small letters: {x}", [
        ("SILVER", "silver"), ("MARKET", "market"),
    ]),
    ("translate", "What is the French word for \"{x}\"? Answer with one word.", [
        ("bread", ["pain", "le pain", "du pain"]), ("cat", ["chat", "le chat", "un chat", "chatte"]),
        ("water", ["eau", "l'eau", "de l'eau"]),
    ]),
    ("translate", "What is the English word for the Spanish word \"{x}\"?", [
        ("agua", "water"), ("gato", "cat"), ("sol", "sun"), ("perro", "dog"),
    ]),
    ("translate", "What is the English meaning of the French word \"{x}\"?", [
        ("rouge", "red"), ("merci", ["thank you", "thanks"]), ("oui", "yes"),
    ]),
    ("translate", "Translate this word into Spanish: {x}", [
        ("milk", ["leche", "la leche"]), ("red", ["rojo", "roja"]), ("night", ["noche", "la noche"]),
    ]),
    ("list", "What is the last number in this list: {x}?", [
        ("6, 2, 9", "9"), ("14, 3, 27", "27"), ("5, 8, 1, 4", "4"),
    ]),
    ("list", "What is the first word in this list: {x}?", [
        ("chair, cloud, ring", "chair"), ("coffee, paper, glass", "coffee"), ("moon, fish, road, cup", "moon"),
    ]),
    ("list", "What is the second word in this list: {x}?", [
        ("king, snow, letter", "snow"), ("shirt, pencil, lake", "pencil"),
    ]),
    ("list", "List: {x}\nWhat is the last item of the list?", [
        ("bread, butter, cheese", "cheese"), ("gold, iron, wood, silk", "silk"), ("bus, ship, plane", "plane"),
    ]),
    ("list", "What is the largest number in this list: {x}?", [
        ("3, 9, 5", "9"), ("12, 7, 4", "12"), ("20, 50, 30", "50"), ("6, 2, 8, 1", "8"),
    ]),
    ("list", "The numbers are {x}. What is the smallest number?", [
        ("8, 3 and 6", ["3", "three"]), ("15, 40 and 22", ["15", "fifteen"]), ("9, 5 and 7", ["5", "five"]),
    ]),
    ("list", "The runners came in like this: {x}. What is the name of the first runner?", [
        ("Nora, Ivan, Clara", "Nora"), ("Leo, Marta, Hugo", "Leo"),
    ]),
    ("either", "Is {x}? Answer with one word.", [
        ("fire hot or cold", "hot"), ("an elephant big or small", ["big", "large", "big animal", "large animal"]),
        ("a snail slow or fast", ["slow", "slow animal", "slow-moving animal", "slow-moving"]),
        ("honey sweet or sour", "sweet"), ("a feather light or heavy", ["light", "lightweight"]),
    ]),
    ("either", "Is the number {x} even or odd?", [
        ("7", ["odd", "odd number"]), ("8", ["even", "even number"]), ("10", ["even", "even number"]), ("3", ["odd", "odd number"]),
    ]),
    ("either", "Choose one word: is {x}?", [
        ("a carrot a vegetable or a bird", ["vegetable", "type of vegetable", "root vegetable", "type of root vegetable"]),
        ("gold a metal or a fruit", ["metal", "precious metal", "type of metal"]),
        ("a violin an instrument or a sport", ["instrument", "musical instrument", "string instrument", "stringed instrument"]),
        ("a salmon a fish or a tree", ["fish", "type of fish"]),
    ]),
    ("either", "Find the {x}. Write only that word.", [
        ("animal among these words: sofa, goat, cloud", "goat"), ("color among these words: purple, fork, train", "purple"),
        ("month among these words: spoon, July, door", "July"), ("vehicle among these words: soup, tulip, truck", "truck"),
    ]),
    ("sentiment", "Is this review positive or negative? \"{x}\"", [
        ("The soup was delicious.", ["positive", "positive review"]),
        ("The room smelled bad and the bed was hard.", ["negative", "negative review"]),
        ("Great service. We will come again!", ["positive", "positive review"]),
        ("I want my money back.", ["negative", "negative review"]),
        ("The shoes fell apart after two walks.", ["negative", "negative review"]),
    ]),
    ("sentiment", "What is the sentiment of this message, positive or negative? \"{x}\"", [
        ("What a lovely surprise, thank you so much!", ["positive", "positive sentiment"]),
        ("I am so tired of this terrible weather.", ["negative", "negative sentiment"]),
        ("Our team won and everybody is singing.", ["positive", "positive sentiment"]),
        ("You ruined my evening.", ["negative", "negative sentiment"]),
        ("The new park is a joy for the whole town.", ["positive", "positive sentiment"]),
    ]),
    ("sentiment", "Does the writer of this sentence feel happy or sad? \"{x}\" Answer with one word.", [
        ("I got the job that I always wanted!", ["happy", "feeling happy", "The writer of this sentence feels happy", "The writer feels happy"]),
        ("My best friend moved away and I miss her.", ["sad", "feeling sad", "The writer of this sentence feels sad", "The writer feels sad"]),
        ("Nobody came to my birthday party.", ["sad", "feeling sad", "The writer of this sentence feels sad", "The writer feels sad"]),
        ("Today is the best day of the summer!", ["happy", "feeling happy", "The writer of this sentence feels happy", "The writer feels happy"]),
    ]),
    ("sentiment", "Is this comment good or bad for the cook? \"{x}\" Answer with one word.", [
        ("The pie tasted wonderful.", ["good", "good comment", "good for the cook"]),
        ("The meat was burnt and dry.", ["bad", "bad comment", "bad for the cook"]),
        ("I have never eaten a better cake.", ["good", "good comment", "good for the cook"]),
    ]),
    ("number", "What is {x}?", [
        ("6 + 2", ["8", "eight", "6 + 2 equals 8"]), ("7 - 2", ["5", "five", "7 - 2 equals 5"]),
        ("10 + 5", ["15", "fifteen", "10 + 5 equals 15"]), ("2 x 4", ["8", "eight", "2 x 4 equals 8"]),
    ]),
    ("number", "What is the sum of {x}? Give only the number.", [
        ("4 and 5", ["9", "nine"]), ("2 and 6", ["8", "eight"]), ("10 and 3", ["13", "thirteen"]),
    ]),
    ("number", "What is twice {x}? Answer with a number.", [
        ("3", ["6", "six"]), ("10", ["20", "twenty"]),
    ]),
    ("count", "How many letters are in the word \"{x}\"? Answer with a number.", [
        ("cat", ["3", "three", "3 letters", "three letters", "3 letters in the word", "three letters in the word"]),
        ("book", ["4", "four", "4 letters", "four letters", "4 letters in the word", "four letters in the word"]),
    ]),
    ("count", "What is the number of legs of a {x}?", [
        ("spider", ["8", "eight", "8 legs", "eight legs"]), ("bird", ["2", "two", "2 legs", "two legs"]),
        ("horse", ["4", "four", "4 legs", "four legs"]),
    ]),
    ("count", "What is the number of {x}? Answer with a number.", [
        ("hours in a day", ["24", "twenty-four", "24 hours", "24 hours in a day"]),
        ("seconds in a minute", ["60", "sixty", "60 seconds", "60 seconds in a minute"]),
        ("letters in the English alphabet", ["26", "twenty-six", "26 letters", "26 letters in the English alphabet"]),
        ("sides of a triangle", ["3", "three", "3 sides", "three sides"]),
        ("cents in a dollar", ["100", "one hundred", "hundred", "100 cents", "100 cents in a dollar"]),
    ]),
    ("order", "What is the day after {x}? Answer with one word.", [
        ("Monday", "Tuesday"), ("Wednesday", "Thursday"), ("Friday", "Saturday"),
    ]),
    ("order", "What is the month that follows {x}?", [
        ("March", "April"), ("June", "July"), ("October", "November"),
    ]),
    ("order", "What is the next number after {x}?", [
        ("7", ["8", "eight"]), ("12", ["13", "thirteen"]), ("30", ["31", "thirty-one"]),
    ]),
    ("compare", "What is the larger of the numbers {x}?", [
        ("12 and 5", ["12", "twelve"]), ("30 and 80", ["80", "eighty"]), ("7 and 9", ["9", "nine"]),
    ]),
    ("compare", "What is the longer of the words {x}?", [
        ("\"sun\" and \"mountain\"", "mountain"), ("\"elephant\" and \"cow\"", "elephant"), ("\"tea\" and \"chocolate\"", "chocolate"),
    ]),
    ("compare", "There are two animals in the field, {x}. What is the bigger animal?", [
        ("a horse and a mouse", "horse"), ("a bee and a bear", "bear"),
    ]),
    ("naming", "What is a baby {x} called? Answer with one word.", [
        ("cat", ["kitten", "kitty"]), ("dog", ["puppy", "pup"]), ("sheep", "lamb"),
    ]),
    ("naming", "What is a person who {x} called? Answer with one word.", [
        ("bakes bread", ["baker", "bread baker"]), ("flies a plane", ["pilot", "airplane pilot", "airline pilot", "aviator"]),
        ("writes books", ["author", "writer", "novelist"]), ("paints pictures", ["painter", "artist"]),
    ]),
    ("naming", "What is the word for {x}?", [
        ("frozen water", "ice"), ("a doctor who treats teeth", "dentist"), ("the meal in the morning", "breakfast"),
    ]),
    ("color", "What is the color of {x}? Answer with one word.", [
        ("snow", ["white", "pure white"]), ("fresh grass", ["green", "bright green"]), ("a ripe banana", ["yellow", "bright yellow"]),
        ("coal", ["black", "dark black"]), ("blood", ["red", "bright red", "dark red"]),
    ]),
    ("extract", "What is the year in this sentence? \"{x}\"", [
        ("The bridge was opened in 1934.", ["1934", "year 1934"]), ("She moved to Canada in 2005.", ["2005", "year 2005"]),
        ("In 1871 the town got its first school.", ["1871", "year 1871"]),
    ]),
    ("extract", "What is the name in this sentence? \"{x}\"", [
        ("My friend Robert fell asleep.", "Robert"), ("Yesterday Julia came home late.", "Julia"),
        ("The red coat belongs to Daniel.", "Daniel"),
    ]),
    ("extract", "What is the city in this sentence? \"{x}\"", [
        ("We flew to Lisbon with our aunt.", ["Lisbon", "city of Lisbon"]),
        ("The museum in Chicago stayed closed.", ["Chicago", "city of Chicago"]),
        ("Her train to Munich came late.", ["Munich", "city of Munich"]),
    ]),
    ("extract", "Take the number out of this text and write only the number: {x}", [
        ("The box holds 64 pencils.", "64"), ("Page 210 is missing.", "210"), ("We need 9 more chairs.", ["9", "nine"]),
    ]),
    ("extract", "{x}", [
        ("The password of the computer is bluefish. What is the password?", "bluefish"),
        ("Our flight number is KL204. What is our flight number?", "KL204"),
        ("Today's special is tomato soup. What is today's special?", "tomato soup"),
        ("My address is 5 Hill Road. What is my address?", "5 Hill Road"),
    ]),
    ("extract", "{x}", [
        ("The key is under the mat. Where is the key?", ["under the mat", "located under the mat", "mat"]),
        ("The cake is in the fridge. Where is the cake?", ["fridge", "in the fridge"]),
        ("The milk is on the table. Where is the milk?", ["on the table", "located on the table", "table"]),
    ]),
    ("extract", "{x}", [
        ("Kim bought apples and Lee bought oranges. What did Kim buy?", ["apples", "Kim bought apples"]),
        ("Lucy forgot her umbrella on the train. What did Lucy forget?", [
            "umbrella", "her umbrella", "Lucy forgot her umbrella", "Lucy forgot her umbrella on the train",
            "She forgot her umbrella", "She forgot her umbrella on the train",
        ]),
        ("Ravi plays the violin in a school orchestra. What does Ravi play?", [
            "violin", "Ravi plays the violin", "Ravi plays the violin in a school orchestra", "Ravi plays violin", "He plays the violin",
        ]),
    ]),
    ("extract", "Our dog has the name Rex and our cat has the name Luna. What is the name of the {x}?", [
        ("dog", "Rex"), ("cat", "Luna"),
    ]),
]

MORE_SINGLE = [
    ("place", "What is the largest ocean in the world?", ["Pacific Ocean", "Pacific"]),
    ("place", "What is the highest mountain in the world?", ["Mount Everest", "Everest", "Mt Everest"]),
    ("place", "In which country are the pyramids of Giza? Answer with one word.", "Egypt"),
    ("place", "In which city is the Eiffel Tower? Answer with one word.", "Paris"),
    ("extract", "Tariq won the race and Boris came second. What is the name of the winner?", "Tariq"),
    ("extract", "The car is black and the bike is orange. What is the color of the bike?", "orange"),
    ("extract", "The river Dova is 90 miles long. What is the length of the river Dova?", ["90 miles", "90 miles long", "90"]),
    ("extract", "Bella is a gray cat who lives on a farm. What kind of animal is Bella?", [
        "cat", "gray cat", "grey cat", "gray cat who lives on a farm", "gray cat that lives on a farm",
    ]),
    ("extract", "Omar has three sons and one daughter. How many sons does Omar have?", ["three", "3", "three sons", "3 sons"]),
    ("extract", "The library is on Maple Street. On which street is the library?", [
        "Maple Street", "on Maple Street", "located on Maple Street", "Maple",
    ]),
    ("extract", "The recipe needs 3 eggs and some flour. How many eggs does the recipe need?", [
        "3", "three", "3 eggs", "three eggs", "The recipe needs 3 eggs", "The recipe needs three eggs",
    ]),
    ("extract", "Grandma is 72 years old and Grandpa is 75 years old. What is the age of Grandma?", ["72", "72 years", "72 years old"]),
    ("extract", "The museum is closed on Mondays. What is the day when the museum is closed?", [
        "Monday", "Mondays", "on Mondays", "on Monday", "closed on Mondays", "closed on Monday",
    ]),
    ("extract", "The concert hall has 900 seats. What is the number of seats in the concert hall?", [
        "900", "900 seats", "900 seats in the concert hall",
    ]),
    ("extract", "Order 8841 was sent to Mrs Fox. What is the order number?", ["8841", "Order 8841"]),
    ("extract", "The meeting was moved from Tuesday to Friday. What is the new day of the meeting?", ["Friday", "on Friday"]),
    ("extract", "The book costs 12 dollars and the pen costs 4 dollars. What is the price of the pen?", ["4", "4 dollars", "$4", "four dollars"]),
    ("extract", "In the story a fox steals a golden ring. What is the stolen object?", ["golden ring", "ring", "gold ring"]),
    ("extract", "Daniel is taller than Mike. What is the name of the taller boy?", "Daniel"),
    ("extract", "The flag of our club is blue and white. What are the colors of the flag?", ["blue and white", "white and blue"]),
    ("extract", "It rained all day yesterday, but today it is sunny. What is the weather today?", ["sunny", "sunny today"]),
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
    for groups, singles in ((GROUPS, SINGLE), (MORE_GROUPS, MORE_SINGLE)):
        for label, wording, items in groups:
            seen[label] = seen.get(label, 0) + 1
            for x, answers in items:
                add(label, f"instruct-{label}-{seen[label]}", wording.replace("{x}", x), answers)
        for label, context, answers in singles:
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
